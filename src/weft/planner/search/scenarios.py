"""Training scenarios: models of common sizes, each with its best plan, training time and cost on a given cluster."""

from dataclasses import dataclass

from weft.errors import PlanError
from weft.launch.log import log
from weft.plan import Compute, Precision
from weft.planner.costmodel.hardware import ClusterSpec
from weft.planner.costmodel.shape import Shape
from weft.planner.search.search import search
from weft.planner.search.space import Choice, Space
from weft.planner.search.space_of_job import type_of
from weft.planner.search.strategy import Cost, cost_of, stack_for

TOKENS_PER_PARAMETER = 20.0  # tokens per parameter of compute-optimal training (Hoffmann et al., Chinchilla, 2022)
BATCH_TOKENS = 2**21  # per step: about two million, common for models of a billion parameters and more
DATA_ONLY = dict.fromkeys(("tp", "cp", "pp"), "the model is not a decoder")
LARGEST_BATCH = 2**24


@dataclass(frozen=True)
class Scenario:
    """A type of training: modality, sequence length and models."""

    name: str
    seq: int
    """Tokens per sequence."""
    models: dict[str, Shape]
    is_decoder: bool
    """True if tensor, context and pipeline parallelism apply; otherwise only data parallelism and ZeRO."""
    note: str


def _encoder(layers: int, hidden: int, heads: int, ffn: int) -> Shape:
    """Shape of a vision transformer: MLPs without gating, patches instead of tokens."""
    return Shape(layers, hidden, heads, heads, hidden // heads, ffn, 1000, gated=False, biases=True)


SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            "nlp",
            4096,
            {
                "SmolLM2 135M": Shape(30, 576, 9, 3, 64, 1536, 49152, tied=True),
                "Llama 3.2 1B": Shape(16, 2048, 32, 8, 64, 8192, 128256, tied=True),
                "Llama 3.1 8B": Shape(32, 4096, 32, 8, 128, 14336, 128256),
                "Qwen3 30B-A3B": Shape(48, 2048, 32, 4, 128, 0, 151936, experts=128, top_k=8, expert_ffn=768),
                "Llama 3.1 70B": Shape(80, 8192, 64, 8, 128, 28672, 128256),
                "Qwen3 235B-A22B": Shape(94, 4096, 64, 4, 128, 0, 151936, experts=128, top_k=8, expert_ffn=1536),
                "DeepSeek-V3 671B": Shape(
                    61,
                    7168,
                    128,
                    128,
                    128,
                    18432,
                    129280,
                    q_lora=1536,
                    kv_lora=512,
                    rope_dim=64,
                    value_dim=128,
                    experts=256,
                    top_k=8,
                    top_groups=4,
                    expert_ffn=2048,
                    shared_ffn=2048,
                    dense_layers=3,
                ),
            },
            True,
            "text sequences of 4,096 tokens",
        ),
        Scenario(
            "vision",
            256,
            {
                "ViT-B/14": _encoder(12, 768, 12, 3072),
                "ViT-L/14": _encoder(24, 1024, 16, 4096),
                "ViT-H/14": _encoder(32, 1280, 16, 5120),
                "ViT-g/14": _encoder(40, 1408, 16, 6144),
                "ViT-22B": _encoder(48, 6144, 48, 24576),
            },
            False,
            "images of 224 x 224 pixels in patches of 14 x 14: 256 tokens each; data parallelism and ZeRO only",
        ),
        Scenario(
            "multimodal",
            8192,
            {
                "3B (Qwen2.5-VL size)": Shape(36, 2048, 16, 2, 128, 11008, 151936, tied=True),
                "7B (Qwen2.5-VL size)": Shape(28, 3584, 28, 4, 128, 18944, 152064),
                "32B (Qwen2.5-VL size)": Shape(64, 5120, 40, 8, 128, 27648, 152064),
                "72B (Qwen2.5-VL size)": Shape(80, 8192, 64, 8, 128, 29568, 152064),
            },
            True,
            "sequences of 8,192 tokens of text and images; only the language model, which takes nearly all of the time",
        ),
    )
}


@dataclass(frozen=True)
class ScenarioPlan:
    """A model with its best plan and its training cost; both are None if no layout fits."""

    model: str
    shape: Shape
    global_batch: int
    tokens: float
    """Number of tokens to train on."""
    choice: Choice | None
    cost: Cost | None

    @property
    def days(self) -> float:
        """Training time in days, without failures."""
        return self.tokens / self.cost.tokens_per_second / 86400 if self.cost else float("inf")

    @property
    def dollars(self) -> float:
        """Total cost of the devices in dollars; 0 if no price is known."""
        return (self.cost.dollars_per_trillion_tokens or 0.0) * self.tokens / 1e12 if self.cost else 0.0

    @property
    def joules(self) -> float:
        """Total energy of the devices; 0 if no power is known."""
        return (self.cost.joules_per_token or 0.0) * self.tokens if self.cost else 0.0

    @property
    def tonnes_co2(self) -> float:
        """Total emission; 0 if no rate is known."""
        return (self.cost.grams_co2_per_million_tokens or 0.0) * self.tokens / 1e12 if self.cost else 0.0


def find_scenario(name: str) -> Scenario:
    """Look up a scenario by name.

    Raises:
        PlanError: the name is unknown.
    """
    if name in SCENARIOS:
        return SCENARIOS[name]
    raise PlanError(
        f"there is no scenario {name!r}",
        rule=f"a scenario is one of {', '.join(SCENARIOS)}",
        fix="choose one of these scenarios",
    )


def plan_scenario(
    scenario: Scenario, cluster: ClusterSpec, tokens: float = 0.0, scalar: float = 1.0
) -> list[ScenarioPlan]:
    """Find the best plan for each model of a scenario.

    Args:
        scenario: models and sequence length.
        cluster: cluster to train on; all devices are used.
        tokens: number of tokens to train on; 0: 20 per active parameter.
        scalar: measured / predicted step time of this machine.
    """
    precision = Precision().resolve(cluster.device.native_bf16)
    stack, found = stack_for(precision, Compute(), type_of(cluster)), []
    for name, shape in scenario.models.items():
        log(f"searching a plan for {name}")
        batch = batch_of(scenario.seq, cluster.num_devices)
        unsplit = {} if scenario.is_decoder else DATA_ONLY
        space = Space(shape, scenario.seq, batch, cluster, stack, dtype=precision.param_dtype, unsplit=unsplit)
        best = search(space, 1).best
        wanted = tokens or TOKENS_PER_PARAMETER * shape.active_parameters
        cost = cost_of(shape, best[0].layout, best[0].time.seconds, cluster, 0.0, scalar) if best else None
        found.append(ScenarioPlan(name, shape, batch, wanted, best[0] if best else None, cost))
    return found


def batch_of(seq: int, num_devices: int) -> int:
    """Sequences per step: about two million tokens, a multiple of the devices; at least one per device if possible."""
    rows = max(1, BATCH_TOKENS // seq // num_devices) * num_devices
    return min(rows, max(num_devices, LARGEST_BATCH // seq))


def recommended(found: list[ScenarioPlan], days: float) -> ScenarioPlan | None:
    """Largest model that can be trained in `days` days; None if there is none."""
    fitting = [plan for plan in found if plan.choice and plan.days <= days]
    return max(fitting, key=lambda plan: plan.shape.parameters, default=None)

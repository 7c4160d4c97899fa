"""What can be trained on the devices at hand: models of usual sizes, each with its best plan, its time and its price."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from weft.errors import PlanError
from weft.plan import Precision
from weft.planner.costmodel.hardware import ClusterSpec
from weft.planner.costmodel.shape import KNOWN, Shape
from weft.planner.search.search import MARGIN, Choice, Space, search
from weft.planner.search.strategy import Cost, cost_of, stack_for

ENOUGH = 20.0  # tokens a parameter of compute-optimal training (Hoffmann et al., Chinchilla, 2022)
BATCH_TOKENS = 2**21  # of a step: about two million, as is usual from a billion parameters on
DATA_ONLY = dict.fromkeys(("tp", "cp", "pp"), "the model is no decoder")
LARGEST_BATCH = 2**24


@dataclass(frozen=True)
class Scenario:
    """A kind of training."""

    name: str
    seq: int
    """Tokens of a row."""
    models: dict[str, Shape]
    is_decoder: bool
    """Whether tensor, context and pipeline parallelism can split it; else data parallelism and ZeRO do."""
    note: str


def _encoder(layers: int, hidden: int, heads: int, ffn: int) -> Shape:
    """A vision transformer: plain feed-forward parts, patches in the place of words."""
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
                "Qwen3 30B-A3B": KNOWN["qwen330b"],
                "Llama 3.1 70B": Shape(80, 8192, 64, 8, 128, 28672, 128256),
                "Qwen3 235B-A22B": KNOWN["qwen3235b"],
                "DeepSeek-V3 671B": replace(KNOWN["deepseekv3"], predict_ahead=0),
            },
            True,
            "rows of 4,096 tokens of text",
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
            "images of 224 x 224 in patches of 14 x 14: 256 tokens each; split over data ranks and by ZeRO alone",
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
            "rows of 8,192 tokens of text and images; the language model, which takes nearly all of the time",
        ),
    )
}


@dataclass(frozen=True)
class Option:
    """A model, the best plan for it, and what training it takes; without a plan where nothing fits."""

    model: str
    shape: Shape
    global_batch: int
    tokens: float
    """To train on."""
    choice: Choice | None
    cost: Cost | None

    @property
    def days(self) -> float:
        """Of training, failures apart."""
        return self.tokens / self.cost.tokens_per_second / 86400 if self.cost else float("inf")

    @property
    def dollars(self) -> float:
        """Of the devices, for all of it; 0 where no price is known."""
        return (self.cost.dollars_per_trillion_tokens or 0.0) * self.tokens / 1e12 if self.cost else 0.0


def find_scenario(name: str) -> Scenario:
    """By its name.

    Raises:
        PlanError: there is none of that name.
    """
    if name in SCENARIOS:
        return SCENARIOS[name]
    raise PlanError(
        f"no scenario is called {name!r}", rule=f"there are {', '.join(SCENARIOS)}", fix="choose one of them"
    )


def options(
    scenario: Scenario,
    cluster: ClusterSpec,
    tokens: float = 0.0,
    scalar: float = 1.0,
    margin: float = MARGIN,
    say: Callable[[str], None] = print,
) -> list[Option]:
    """Each model of a scenario on a cluster.

    Args:
        scenario: models and rows.
        cluster: all of it is used.
        tokens: to train on; 0: 20 a parameter that a token meets.
        scalar: measured over predicted step time of this machine.
        margin: of a device's memory that a plan may fill.
        say: takes lines of progress.
    """
    precision = Precision().resolve(cluster.device.native_bf16)
    stack, found = stack_for(precision), []
    for name, shape in scenario.models.items():
        say(f"searching for {name}")
        batch = batch_of(scenario.seq, cluster.num_devices)
        unsplit = {} if scenario.is_decoder else DATA_ONLY
        space = Space(shape, scenario.seq, batch, cluster, stack, margin, number=precision.param_dtype, unsplit=unsplit)
        best = search(space, 1).best
        wanted = tokens or ENOUGH * shape.active_parameters
        cost = cost_of(shape, best[0].layout, best[0].time.seconds, cluster, 0.0, scalar) if best else None
        found.append(Option(name, shape, batch, wanted, best[0] if best else None, cost))
    return found


def batch_of(seq: int, num_devices: int) -> int:
    """Rows of a step: two million tokens, or more where devices would have less than a row, in a multiple of the devices."""
    rows = max(1, BATCH_TOKENS // seq // num_devices) * num_devices
    return min(rows, max(num_devices, LARGEST_BATCH // seq))


def recommended(found: list[Option], days: float) -> Option | None:
    """The largest model whose training ends in so many days."""
    fitting = [option for option in found if option.choice and option.days <= days]
    return max(fitting, key=lambda option: option.shape.parameters, default=None)

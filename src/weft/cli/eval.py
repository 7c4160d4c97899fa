"""weft eval"""

import os
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.options import Ranks, Step


def eval(
    source: Annotated[Path, typer.Argument(help="Run folder, or Hugging Face folder of a model.")],
    tasks: Annotated[
        list[str],
        typer.Option(
            help="Task of lm-eval by name, .yaml file, folder with .yaml files, or .jsonl file of your own; repeatable."
        ),
    ],
    step: Step = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum records per task; default: all.")] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(min=0, help="Worked examples in each prompt; default: as each task says.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows per forward of a rank.")] = 8,
    apply_chat_template: Annotated[
        bool, typer.Option("--apply-chat-template", help="Render prompts by the tokenizer's chat template.")
    ] = False,
    system_instruction: Annotated[str | None, typer.Option(help="System prompt, or text before each prompt.")] = None,
    fewshot_as_multiturn: Annotated[
        bool, typer.Option("--fewshot-as-multiturn", help="Worked examples as turns of user and assistant.")
    ] = False,
    chat_template_args: Annotated[
        str, typer.Option(help="Arguments of the chat template: NAME=VALUE,... or a JSON object.")
    ] = "",
    gen_kwargs: Annotated[
        str, typer.Option(help="Settings of generated answers, such as temperature=0.7,max_gen_toks=512.")
    ] = "",
    log_samples: Annotated[
        bool, typer.Option("--log-samples", help="Write prompts and answers to eval.samples.jsonl beside the results.")
    ] = False,
    nproc_per_node: Ranks = None,
    out: Annotated[Path | None, typer.Option(help="File of the results; default: eval.json in the folder.")] = None,
) -> None:
    """Evaluate a model on tasks with lm-eval.

    Divides the records of the tasks over ranks, each with the full model; writes the results to eval.json.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads would slow down all other processes
    # For numpy: ranks are forked from this process, which must have no second thread.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from weft.cli.outputs import check_outputs
    from weft.evaluation.results import RESULTS
    from weft.inputs import check_source

    check_source(source, step)
    check_outputs(out=out or (source / RESULTS if source.is_dir() else None))

    import transformers  # after the checks above, because importing torch and Transformers takes seconds

    from weft.evaluation.prompts import Prompts, parse_settings
    from weft.evaluation.run import evaluate_model
    from weft.observe.evaluation import print_results

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    names = tuple(name for text in tasks for name in text.split(",") if name)
    results = evaluate_model(
        source,
        names,
        step=step,
        limit=limit,
        num_fewshot=num_fewshot,
        batch_size=batch_size,
        ranks=nproc_per_node,
        out=out,
        prompts=Prompts(
            apply_chat_template,
            fewshot_as_multiturn,
            system_instruction,
            parse_settings(chat_template_args, "--chat-template-args"),
            parse_settings(gen_kwargs, "--gen-kwargs"),
        ),
        log_samples=log_samples,
    )
    print_results(results)

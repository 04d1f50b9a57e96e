"""The command line: parse, call, print."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from hybridize import __version__
from hybridize.errors import HybridizeError

app = typer.Typer(
    help="Turn a pretrained full-attention LLM into an efficient long-context hybrid, and prove what was kept and saved.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Model = Annotated[str, typer.Argument(help="'smollm2' (embedded default), a local folder, a .gguf file, or a hub id.")]
Out = Annotated[Path, typer.Option(help="Output folder.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an output folder that is not empty.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout, nothing else.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
DeviceMap = Annotated[str | None, typer.Option(help="As transformers takes it: auto, cuda, cpu.")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that the model folder brings.")]
SELECTORS = "drop, nll, greedy, backward, lazy, duo, kl, halo, echo, retrieval or reasoning (docs/scores.md)."
Selector = Annotated[str, typer.Option(help=SELECTORS)]
Budget = Annotated[float, typer.Option(help="Share of layers (or groups) that keep the base's attention, 0..1.")]
WindowSize = Annotated[int, typer.Option("--window", help="Window of the others, tokens, the query's own included.")]
Sinks = Annotated[int, typer.Option(help="First tokens that stay visible.")]
SinkPositions = Annotated[str, typer.Option(help="absolute, or rebased: RoPE distance to sinks stays bounded.")]
Decode = Annotated[str, typer.Option(help="window, or full: generated tokens see everything (no memory is saved).")]
Unit = Annotated[str | None, typer.Option(help="layer, group or head; the selector's own without it.")]
Prompts = Annotated[int, typer.Option(help="Calibration prompts.")]
Length = Annotated[str, typer.Option(help="Tokens of a calibration prompt, comma-separated; prompts are shared out.")]
Text = Annotated[str, typer.Option(help="Calibration text: 'calibration' (bundled), a .txt or .jsonl file, hub:NAME.")]
Seed = Annotated[int, typer.Option(help="Seed of the calibration prompts.")]
BatchTokens = Annotated[int, typer.Option(help="Padded tokens a batch.")]
TestPrompts = Annotated[int, typer.Option(help="Needle prompts per length and plan.")]
Lengths = Annotated[str, typer.Option(help="Needle lengths, tokens, comma-separated.")]
PlanFile = Annotated[Path | None, typer.Option("--plan", help="A plan.json to use.")]
Ruler = Annotated[str | None, typer.Option(help="RULER tasks, comma-separated, or 'all'; at every length.")]
Qa = Annotated[list[str] | None, typer.Option(help="A SQuAD or HotpotQA .json: RULER's qa_1, qa_2; repeatable.")]
Choice = Annotated[list[str] | None, typer.Option(help="A jsonl set or a folder of them (choices, LAMBADA, ...); repeatable.")]
Perplexity = Annotated[list[str] | None, typer.Option(help="A .txt or .jsonl scored with a sliding stride; repeatable.")]
Long = Annotated[list[str] | None, typer.Option(help="A LongBench .jsonl or LongMemEval .json; repeatable.")]
Drift = Annotated[int, typer.Option(help="Tokens of a long generation, base against hybrid; 0: none.")]
Limit = Annotated[
    int | None, typer.Option(help="Only so many rows (views) of each set: the first, or spread over a folder's files.")
]
Beyond = Annotated[
    bool, typer.Option("--beyond", help="Lengths may exceed the base's context; plans that cannot reach are left out there.")
]
ScoresFile = Annotated[
    Path | None, typer.Option("--scores", help="A scores.json, or DuoAttention's .tsv of gates, to use instead of scoring.")
]


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


@app.command()
def demo(
    out: Out = Path("demo-run"),
    budget: Budget = 0.25,
    window: WindowSize = 128,
    sinks: Sinks = 4,
    prompts: Prompts = 8,
    length: Annotated[int, typer.Option(help="Tokens of every prompt.")] = 1024,
    test_prompts: TestPrompts = 20,
    model: Annotated[str, typer.Option(help="Another model than the embedded default.")] = "smollm2",
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """The whole story on a real 135M model, on a CPU, in minutes: score, convert, prove, report."""
    from hybridize import verbs

    verbs.demo(_console(as_json), **locals())


@app.command()
def score(
    model: Model,
    out: Out,
    selector: Selector = "drop",
    budget: Budget = 0.25,
    window: WindowSize = 128,
    sinks: Sinks = 4,
    sink_positions: SinkPositions = "absolute",
    decode: Decode = "window",
    unit: Unit = None,
    prompts: Prompts = 8,
    length: Length = "1024",
    text: Text = "calibration",
    seed: Seed = 1,
    batch_tokens: BatchTokens = 1024,
    dtype: Dtype = "auto",
    device_map: DeviceMap = None,
    trust_remote_code: Trust = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Score every layer or group; writes scores.json."""
    from hybridize import verbs

    verbs.score(_console(as_json), **locals())


@app.command()
def plan(
    model: Model,
    out: Annotated[Path | None, typer.Option(help="Where to write plan.json; without it the plan is only printed.")] = None,
    scores: ScoresFile = None,
    selector: Annotated[
        str | None, typer.Option(help="Without scores: periodic-PHASE, random-SEED, random-groups-SEED, all-window.")
    ] = None,
    budget: Budget = 0.25,
    window: WindowSize = 128,
    sinks: Sinks = 4,
    sink_positions: SinkPositions = "absolute",
    decode: Decode = "window",
    batch: Annotated[int, typer.Option(help="Rows, for the memory estimate.")] = 1,
    trust_remote_code: Trust = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Make a plan from scores (or a control), print its map and what it costs; loads no weights."""
    from hybridize import verbs

    verbs.plan(_console(as_json), **locals())


@app.command()
def convert(
    model: Model,
    out: Out,
    method: Annotated[str, typer.Option(help="nll, igal, flashmorph, rtpurbo or l2a (docs/).")] = "nll",
    selector: Annotated[
        str | None,
        typer.Option(
            help=f"{SELECTORS} Default: nll drop, flashmorph gates, others echo; flashmorph also periodic-PHASE, random-SEED."
        ),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(
            "--budget",
            "--ratio",
            help="Share of layers, groups or (rtpurbo) heads that reach far. Default: 0.25, igal 0.0625, rtpurbo 0.15.",
        ),
    ] = None,
    window: Annotated[int | None, typer.Option(help="Window, tokens. Default: 64, nll 128, l2a 512, rtpurbo 1024.")] = None,
    sinks: Annotated[int | None, typer.Option(help="First tokens that stay visible. Default: 4.")] = None,
    sink_positions: Annotated[
        str | None, typer.Option(help="absolute, or rebased: distances stay bounded. Default: rebased; nll, rtpurbo absolute.")
    ] = None,
    decode: Decode = "window",
    unit: Unit = None,
    linear: Annotated[
        str | None, typer.Option(help="Linear attention, KEY=VALUE,..., as degree=2,dim=32,rule=delta,rope=false.")
    ] = None,
    indexed: Annotated[
        str | None, typer.Option(help="rtpurbo's attention, KEY=VALUE,..., as dim=16,block=64,dense_below=512,max_tokens=0.")
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="rtpurbo: share of the index's softmax. Default: 0.9.")] = None,
    gated: Annotated[
        str | None, typer.Option(help="l2a's layers, KEY=VALUE,..., as tau=0.1,leak=0.1,share_projections=true,init=identity.")
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="l2a: tokens to reach beyond the base's context, and of each row of training.")
    ] = None,
    rope_theta: Annotated[
        float | None, typer.Option(help="l2a: RoPE base for that context; default the least that covers it.")
    ] = None,
    control: Annotated[
        str | None, typer.Option(help="igal, rtpurbo, l2a: another plan, trained the same (docs/): all-window, lowest, ...")
    ] = None,
    train: Annotated[
        str | None,
        typer.Option(help="Training, KEY=VALUE,..., as steps=200,rows=24,trains=lora; stages by name: gates.steps=200,..."),
    ] = None,
    train_text: Annotated[str | None, typer.Option(help="Text to train on, as --text; default that.")] = None,
    prompts: Prompts = 8,
    length: Length = "1024",
    text: Text = "calibration",
    seed: Seed = 1,
    batch_tokens: BatchTokens = 1024,
    test_prompts: TestPrompts = 20,
    lengths: Lengths = "1024",
    beyond: Beyond = False,
    plan: PlanFile = None,
    scores: ScoresFile = None,
    link: Annotated[bool, typer.Option("--link", help="Write plan and base name only, no copy of the weights.")] = False,
    max_shard_size: Annotated[str, typer.Option(help="Largest weight file.")] = "5GB",
    dtype: Dtype = "auto",
    device_map: DeviceMap = None,
    trust_remote_code: Trust = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and its predicted cost; write nothing.")] = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Convert a model: score it (or take --scores or --plan), train where the method does, prove it against the base."""
    from hybridize import converting

    converting.convert(_console(as_json), **locals())


@app.command()
def prune(
    model: Model,
    out: Out,
    threshold: Annotated[float | None, typer.Option(help="Layers lose it whose closed share is at least this.")] = None,
    budget: Annotated[
        float | None, typer.Option(help="Or: share of the cache bytes that may stay, at the longest length.")
    ] = None,
    prompts: Prompts = 8,
    text: Text = "calibration",
    seed: Seed = 1,
    test_prompts: TestPrompts = 20,
    lengths: Lengths = "1024",
    max_shard_size: Annotated[str, typer.Option(help="Largest weight file.")] = "5GB",
    dtype: Dtype = "auto",
    device_map: DeviceMap = None,
    trust_remote_code: Trust = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Drop the far half of gated layers (l2a) that hardly use it; prove the result against the model as it was."""
    from hybridize import pruning

    pruning.prune(_console(as_json), **locals())


@app.command(name="eval")
def evaluate(
    model: Model,
    out: Out,
    plan: PlanFile = None,
    test_prompts: TestPrompts = 20,
    lengths: Lengths = "1024",
    kinds: Annotated[str, typer.Option(help="Needle kinds, comma-separated; '' for none.")] = "number",
    generate: Annotated[bool, typer.Option("--generate", help="Decode greedily instead of teacher-forced argmax.")] = False,
    ruler: Ruler = None,
    qa: Qa = None,
    choice: Choice = None,
    perplexity: Perplexity = None,
    view: Annotated[int | None, typer.Option(help="Tokens seen at once by --perplexity; default the first length.")] = None,
    stride: Annotated[int | None, typer.Option(help="How far --perplexity moves on; default half the view.")] = None,
    long: Long = None,
    drift: Drift = 0,
    limit: Limit = None,
    beyond: Beyond = False,
    without: Annotated[
        list[str] | None, typer.Option(help="Also measure with this off: window, sinks, linear, indexed, far; repeatable.")
    ] = None,
    perplexity_windows: Annotated[int, typer.Option(help="Stretches for perplexity by position; 0: none.")] = 4,
    text: Annotated[str, typer.Option(help="Text of haystacks and perplexity by position.")] = "evaluation",
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 2,
    batch_tokens: BatchTokens = 4096,
    dtype: Dtype = "auto",
    device_map: DeviceMap = None,
    trust_remote_code: Trust = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what it will cost; write nothing.")] = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Measure a converted folder (or a base under --plan) against its base in the same run."""
    from hybridize import proving

    proving.evaluate(_console(as_json), **locals())


@app.command()
def compare(
    sources: Annotated[
        list[str],
        typer.Argument(help="One .yaml, or entries: controls, selectors, streaming, snapkv, plan or scores files, folders."),
    ],
    out: Out,
    model: Annotated[str | None, typer.Option(help="The base; a .yaml may name it.")] = None,
    budget: Annotated[float | None, typer.Option(help="Share of layers that keep full attention; sets the bytes.")] = None,
    window: Annotated[int | None, typer.Option(help="Window of the others, tokens.")] = None,
    sinks: Annotated[int | None, typer.Option(help="First tokens that stay visible.")] = None,
    match_at: Annotated[int | None, typer.Option(help="Tokens at which bytes are equal; default the longest length.")] = None,
    test_prompts: Annotated[int | None, typer.Option(help="Prompts per task and length.")] = None,
    lengths: Annotated[str | None, typer.Option(help="Tokens, comma-separated.")] = None,
    ruler: Ruler = None,
    qa: Qa = None,
    choice: Choice = None,
    perplexity: Perplexity = None,
    long: Long = None,
    drift: Annotated[int | None, typer.Option(help="Tokens of a long generation.")] = None,
    limit: Limit = None,
    beyond: Beyond = False,
    batch_tokens: Annotated[int | None, typer.Option(help="Padded tokens a batch.")] = None,
    dtype: Dtype = "auto",
    device_map: DeviceMap = None,
    trust_remote_code: Trust = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what it will cost; write nothing.")] = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Compare many plans at equal cache bytes with the base: quality, significance, bytes, FLOPs, one report."""
    from hybridize import proving

    proving.compare(_console(as_json), **locals())


@app.command()
def bench(
    out: Out,
    shape: Annotated[
        str, typer.Option(help="tiny, smollm2-135m, qwen3-1.7b, qwen3-8b, qwen3-30b-heads or llama-3.1-8b.")
    ] = "tiny",
    parts: Annotated[
        str,
        typer.Option(
            help="attention, prefill, decode, train, ragged, batch, indexed; as prefill:4096+8192 with own contexts."
        ),
    ] = "attention,prefill,decode,train,ragged",
    contexts: Annotated[str, typer.Option(help="Tokens, comma-separated.")] = "1024",
    batches: Annotated[str, typer.Option(help="Rows of a decoding step, comma-separated.")] = "1",
    budget: Annotated[
        float,
        typer.Option(
            help="Share of full layers; for igal, of linear groups; for the part indexed, of heads; for l2a, of open tokens."
        ),
    ] = 0.25,
    method: Annotated[
        str | None,
        typer.Option(help="What the hybrid is like: nll, igal, flashmorph or l2a. Default: igal with --linear, else nll."),
    ] = None,
    linear: Annotated[str | None, typer.Option(help="Linear attention: KEY=VALUE,... as convert takes, or 'default'.")] = None,
    window: WindowSize = 512,
    sinks: Sinks = 4,
    backward: Annotated[bool, typer.Option("--backward", help="Attention's backward too.")] = False,
    stock: Annotated[bool, typer.Option(help="Time transformers' own class too.")] = True,
    seconds: Annotated[float, typer.Option(help="Of measuring, for each job.")] = 1.0,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Speed and memory of base and hybrid in one run, on random weights, beside what the machine could do."""
    from hybridize import proving

    proving.bench(_console(as_json), **locals())


@app.command()
def export(
    model: Model,
    out: Out,
    form: Annotated[
        str, typer.Option(help="base (the base again, exactly) or stock (layer_types of stock classes).")
    ] = "base",
    dtype: Dtype = "auto",
    trust_remote_code: Trust = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Write a folder that stock transformers, and what builds on it, loads without hybridize."""
    from hybridize import verbs

    verbs.export(_console(as_json), **locals())


def _console(as_json: bool) -> Any:
    from hybridize.terminal import Terminal

    return Terminal(as_json)


def main() -> None:
    """Entry point: bad input is one clear message and exit code 2."""
    try:
        app()
    except HybridizeError as error:
        if "--json" in sys.argv:
            print(json.dumps({"error": str(error)}))
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()

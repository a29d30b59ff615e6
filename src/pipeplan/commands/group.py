"""All commands under one name: `pipeplan COMMAND ...`.

One table gives each command its line in `pipeplan --help` and the examples under its own help.
"""

import click

from pipeplan.commands.calibrate import calibrate_command
from pipeplan.commands.compare import compare_command
from pipeplan.commands.completion import completion_command
from pipeplan.commands.discover import discover_command
from pipeplan.commands.export import export_command
from pipeplan.commands.export_checkpoint import export_checkpoint_command
from pipeplan.commands.import_files import import_command
from pipeplan.commands.judge import check_command, simulate_command
from pipeplan.commands.narrow_help import NarrowContext
from pipeplan.commands.plan import demo_command, plan_command
from pipeplan.commands.plot import plot_command
from pipeplan.commands.profile import profile_command
from pipeplan.commands.report import report_command, trace_command
from pipeplan.commands.schema import schema_command
from pipeplan.commands.shared import quiet_option
from pipeplan.commands.sweep import sweep_command
from pipeplan.commands.testbed import testbed_command
from pipeplan.commands.whatif import whatif_command
from pipeplan.commands.zoo import zoo_command

__all__ = ["commands"]


@click.group(
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=False,
    epilog="Exit codes: 0 done, 2 wrong input, 3 no plan possible, 130 after Ctrl-C.",
)
@click.version_option(package_name="pipeplan")
def commands() -> None:
    """Plan synchronous pipeline-parallel training.

    MODEL and CLUSTER are names from the zoo (`pipeplan zoo`) or files. The file `-` is standard
    input or, as an output, standard output.
    """


TABLE: tuple[tuple[click.Command, str, tuple[str, ...]], ...] = (
    (
        calibrate_command,
        "Correct a plan's inputs by a real run.",
        (
            "calibrate bert.plan.json trace.json",
            "calibrate bert.plan.json trace.json -o better.plan.json",
        ),
    ),
    (check_command, "Judge a plan by a replay of its own.", ("check bert.plan.json",)),
    (
        compare_command,
        "Compare all planners on one problem.",
        ("compare bert-large 4x2-10g -m 32", "compare vgg19 4x2-10g --planners best,spp,1f1b"),
    ),
    (
        completion_command,
        "Print a script that completes commands.",
        ("completion bash >> ~/.bashrc", 'completion zsh > "${fpath[1]}/_pipeplan"'),
    ),
    (demo_command, "Plan, compare and draw an example.", ("demo -o demo",)),
    (
        discover_command,
        "Write the cluster file of this machine.",
        (
            "discover -o here.cluster.json",
            "discover --from topo.txt --hosts node1 -o node1.cluster.json",
        ),
    ),
    (
        export_command,
        "Write a plan for another framework.",
        ("export bert.plan.json --to torch-csv -o bert.csv",),
    ),
    (
        export_checkpoint_command,
        "Write a checkpoint's model to one file.",
        ("export-checkpoint checkpoints -o model.safetensors",),
    ),
    (
        import_command,
        "Read profiles and clusters of other tools.",
        ("import graph.txt -o my.model.json", "import topo.txt -o here.cluster.json"),
    ),
    (
        plan_command,
        "Plan how to train a model on a cluster.",
        (
            "plan bert-large 4x2-10g -m 32 -o bert.plan.json",
            "plan gpt2-xl my.cluster.yaml --global-batch 512 --report gpt2.html",
        ),
    ),
    (
        plot_command,
        "Draw a plan or a sweep.",
        (
            "plot bert.plan.json -o bert.svg",
            "plot results.csv --x devices --y speedup -o speedup.pdf",
        ),
    ),
    (
        profile_command,
        "Measure a PyTorch model, layer by layer.",
        (
            "profile my_module:build --batch my_module:example_batch -o my.model.json",
            "profile my_module:build --batch my_module:example_batch --estimate a100",
        ),
    ),
    (report_command, "Write a plan as an HTML page.", ("report bert.plan.json -o bert.html",)),
    (
        schema_command,
        "Print the JSON Schema of a format.",
        ("schema cluster > cluster.schema.json",),
    ),
    (simulate_command, "Show a plan's timeline.", ("simulate bert.plan.json --json",)),
    (sweep_command, "Plan a grid of cases, resumable.", ("sweep cases.yaml -o results.csv",)),
    (
        testbed_command,
        "Run a plan on its cluster, emulated here.",
        ("testbed bert.plan.json", "testbed bert.plan.json --report measured.html"),
    ),
    (trace_command, "Write a trace for Perfetto.", ("trace bert.plan.json -o trace.json",)),
    (
        whatif_command,
        "Show what a change of the cluster costs.",
        ("whatif bert.plan.json", "whatif bert.plan.json --lose h0d1 -o new.plan.json"),
    ),
    (zoo_command, "List ready models and clusters.", ("zoo", "zoo bert-large -o my.model.json")),
)

commands.context_class = NarrowContext
for command, summary, examples in TABLE:
    command.short_help = summary
    lines = "\n".join(f"  pipeplan {example}" for example in examples)
    command.epilog = f"\b\n{'Examples' if len(examples) > 1 else 'Example'}:\n{lines}"
    command.context_class = NarrowContext
    command.params.append(quiet_option())
    commands.add_command(command)

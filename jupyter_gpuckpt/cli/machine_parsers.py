"""The commands about the machine and the program itself: their words."""

from __future__ import annotations

from .adding import Group

__all__ = ["add_help_commands", "add_machine_commands"]


def add_machine_commands(group: Group) -> None:
    """Add what is done with the machine."""
    judging = group.add(
        "doctor",
        "machine.doctor",
        "say whether kernels can be saved here, or what is missing",
        "Check everything that a save and a restore need. The exit status is 0 only when they would work, else 4.",
    )
    judging.add_argument("--quick", action="store_true", help="do not save and restore a small process for a trial")
    judging.add_argument(
        "--for",
        dest="engine",
        choices=("slurm", "jupyterhub", "container", "kubernetes"),
        help="also check how that stops servers and jobs, and whether they can be saved in time",
    )
    group.add(
        "setup",
        "machine.setup",
        "install CRIU, for this project alone",
        "Look for a CRIU that works, and where there is none, install one into a folder of its own\n"
        "(GPUCKPT_CRIU_PREFIX). Nothing else of the system changes.",
    )
    serving = group.add(
        "broker",
        "broker.broker",
        "serve users without root, on a machine that people share",
        "Do for users without root what takes root in a save and a restore. `install` makes it a service of the\n"
        "machine's (systemd), `uninstall` takes that away, and `run` serves in the foreground.",
    )
    serving.add_argument("action", metavar="run|install|uninstall", choices=("run", "install", "uninstall"))
    serving.add_argument("--group", metavar="GROUP", default="gpuckpt", help="whose members are served")
    serving.add_argument("--containers", action="store_true", help="serve also containers without rights")

    advising = group.add(
        "recipe",
        "recipes.recipe",
        "print tested configuration for batch systems, hubs and services",
        "Print a configuration file that is tested with this version, to begin your own with; without RECIPE, list\n"
        "which there are.",
    )
    advising.add_argument("recipe", metavar="RECIPE", nargs="?", default="", help="the file's name in the list")


def add_help_commands(group: Group) -> None:
    """Add what tells of the program itself."""
    helping = group.add("help", "about.tell", "say all about a command, or which ones there are")
    helping.add_argument("topic", metavar="COMMAND", nargs="?", default="", help="the command")
    group.add("version", "about.version", "print the version")
    completing = group.add(
        "completion",
        "completion.script",
        "print what completes all of this in a shell",
        "Print what completes commands, options and names in a shell when Tab is pressed:\n"
        '  bash   eval "$(jupyter gpuckpt completion bash)"   in ~/.bashrc\n'
        '  zsh    eval "$(jupyter gpuckpt completion zsh)"    in ~/.zshrc, after compinit\n'
        "  fish   jupyter gpuckpt completion fish | source    in ~/.config/fish/config.fish",
    )
    completing.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")

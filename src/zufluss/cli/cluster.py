"""`zufluss cluster …`: its servers (`balance.py`), and its options, changed while it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from zufluss.cli import balance
from zufluss.cli.output import Output, print_rows
from zufluss.cli.session import (
    DEFAULT_BOOTSTRAP,
    Bootstrap,
    OutputOption,
    Settings,
    connected,
    pairs,
    say,
)

DEFAULT = "DEFAULT"
"""The source of an option that was not set."""

config = typer.Typer(no_args_is_help=True, help="Options of the cluster: get, set, unset.")
app = typer.Typer(no_args_is_help=True, help="The whole cluster: config, servers, tag, rebalance.")
app.add_typer(config, name="config")
app.add_typer(balance.tag, name="tag")
app.add_typer(balance.rebalance, name="rebalance")
app.command()(balance.servers)

KeysArgument = Annotated[list[str], typer.Argument(metavar="KEY…", help="Keys of options.")]


@config.command()
def get(
    keys: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY…]", help="Keys; all set ones if omitted.")
    ] = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show the options that are set, and where: at the start of a server or at run time.

    An option that is named and not set is shown with its default. Secrets are hidden.

    Example:

      zufluss cluster config get remote.data.dirs
    """
    with connected(bootstrap, settings) as connection:
        rows = {c.key: (c.value, c.source) for c in connection.admin.cluster_configs()}
    if keys:
        rows = {key: rows.get(key) or _default(key) for key in keys}
    print_rows(output, ["key", "value", "source"], [(key, *row) for key, row in rows.items()])


@config.command("set")
def set_(
    changes: Annotated[
        list[str], typer.Argument(metavar="KEY=VALUE…", help="Options with their new values.")
    ],
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
) -> None:
    """Set options of the running cluster, durably; all of them or none.

    They override what the servers were started with. Options that take effect only at a start are
    refused; the error lists those that can be changed.

    Example:

      zufluss cluster config set zufluss.remote.adaptive-weights=true
    """
    from zufluss.config.without_effect import OPTIONS_WITHOUT_EFFECT

    values = pairs(changes, "option")
    with connected(bootstrap, settings) as connection:
        connection.admin.alter_cluster_configs(values)
    say(f"set: {', '.join(values)}")
    for key in values:
        if key in OPTIONS_WITHOUT_EFFECT:
            say(f"{key} has no effect here: {OPTIONS_WITHOUT_EFFECT[key].help}")


@config.command()
def unset(
    keys: KeysArgument,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
) -> None:
    """Undo changes of the running cluster; what the servers were started with counts again.

    Example:

      zufluss cluster config unset zufluss.remote.adaptive-weights
    """
    with connected(bootstrap, settings) as connection:
        connection.admin.alter_cluster_configs(reset=keys)
    say(f"unset: {', '.join(keys)}")


def _default(key: str) -> tuple[str, str]:
    from zufluss.config.load import option_of

    option = option_of(key)
    if option is None:
        raise typer.BadParameter(f"{key!r:.100} is no option of a server (docs/configuration.md)")
    return option.default_shown, DEFAULT

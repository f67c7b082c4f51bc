"""How the command shows that something could not be done."""

from rich.text import Text

from budget_recovery_dagster.cli.consoles import errors
from budget_recovery_dagster.cli.harmless_text import harmless


def show_failure(message: str, hint: str) -> None:
    """Write what happened and what to try, a line each, where errors go."""
    console = errors(soft_wrap=True)
    console.print(Text.assemble(("Error:", "bold red"), " ", harmless(console, message)))
    if hint:
        console.print(Text.assemble(("Try:", "bold"), " ", harmless(console, hint)))

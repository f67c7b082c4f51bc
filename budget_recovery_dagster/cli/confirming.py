"""Asking a person."""

import click


def confirmed(question: str) -> bool:
    """Ask a question that is to be answered with yes; to break it off is no answer, and so no."""
    try:
        return click.confirm(question)
    except click.Abort:
        click.echo()
        return False

"""The option that names the data directory of a ``budget-recovery dev``."""

from pathlib import Path

import click

data_dir_option = click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    help="Where all data and logs lie.  [default: /var/lib/budget-recovery as root, else"
    " ~/.local/state/budget-recovery]",
)

"""The budget-recovery command, one file per subcommand."""

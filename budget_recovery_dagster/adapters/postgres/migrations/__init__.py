"""The steps that make and change the control-plane schema, run by ``database.migrate``."""

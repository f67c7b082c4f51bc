"""The steps that make and change the control-plane schema, run by ``postgres_schema.migrate``."""

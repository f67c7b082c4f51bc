"""One file per version of the schema, in order; a released version is never edited."""

"""The report and the token view as pages: one file each, which opens offline and runs no code of a log's."""

"""The DuckDB store and the engine that runs statistics over it."""

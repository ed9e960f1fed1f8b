"""Any table of tokens: Parquet, CSV, JSON lines, Arrow, or a frame in memory."""

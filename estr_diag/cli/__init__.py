"""The command ``estr-diag``. Only this package writes to stdout and stderr, and only it catches errors."""

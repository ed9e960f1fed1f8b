"""``python -m estr_diag`` is the same as ``estr-diag``."""

from estr_diag.cli.app import main

if __name__ == "__main__":
    main()

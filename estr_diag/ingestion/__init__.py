"""Read trainers' dumps into the canonical log: recognise, align, clean, store.

The modules here are shared; one file a trainer is in `trainers`, and any other table in `generic`.
"""

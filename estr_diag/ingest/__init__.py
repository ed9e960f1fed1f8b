"""Read trainers' dumps into the canonical log: recognise, align, clean, store."""

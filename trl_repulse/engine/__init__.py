"""What trainers are made of: drawing, scoring, metrics, second models, checkpoints."""

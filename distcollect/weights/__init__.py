"""How new weights travel from the trainer to its workers."""

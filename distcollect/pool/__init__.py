"""The trainer's side: which worker to ask, what to deliver, where every frame went."""

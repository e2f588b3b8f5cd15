"""The target's half of a round: GDN verification, commit, route masks, and memory for them."""

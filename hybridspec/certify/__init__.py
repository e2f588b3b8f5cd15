"""Whether an engine with drafts still says what its target says: gates, evidence, a certificate."""

"""What proposes tokens. A drafter is one file here, and one line in `echelon.methods`."""

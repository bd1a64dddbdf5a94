"""Networks that draft from a target's hidden states: one architecture a file, the same for training and for drafting.
A head is one file here, and one line in `echelon.methods`."""

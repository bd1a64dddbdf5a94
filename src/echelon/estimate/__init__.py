"""Several devices on paper: what each of them would hold, what would travel between them, and how fast they could be."""

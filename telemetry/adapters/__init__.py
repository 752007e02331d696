"""Reading servers that are not ours: one small file a server, beside what all of them need."""

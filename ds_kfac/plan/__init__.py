"""Who owns what and what moves when: plain data, computed without processes."""

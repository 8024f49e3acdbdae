"""Claims of the papers beside what is stored here, one file per paper; papers/table_papers.py makes a page of them."""

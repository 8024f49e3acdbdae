"""Claims of the papers beside what is stored here, one file per paper; recipes/table_papers.py makes a page of them."""

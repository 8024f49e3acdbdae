"""Claims of the papers compared with the stored results, one file per paper; papers/table_papers.py renders them."""

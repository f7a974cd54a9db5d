"""The fixed interface of the graphs: names, dtypes, shapes, and the arrays that carry them."""

def expression_of(form): raise NotImplementedError

def uniform(seed, position, stream=0):
    raise NotImplementedError

"""The limits of selection, measured on the attention of a model.

Five measurements, each the subject of one figure of "Limitations of Normalization in Attention" (arXiv
2508.17821, Section 5), and the entropies, effective keys, sink masses and output variances of all heads. They
work for every normaliser: the model's own, or another one applied to the logits of the same model without
training it again.

Their definitions are those of :mod:`attnorm.theory`; here they run over all heads and rows of a layer at
once, on inner products instead of vectors, which costs O(L²) memory per layer whatever the number of heads.
"""

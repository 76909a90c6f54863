import torch

from models.training.evaluation import normalised_error


def test_the_mean_of_the_target_has_error_one(generator):
    target = torch.randn(7, generator=generator, dtype=torch.float64)
    losses = (target.mean() - target).square()
    torch.testing.assert_close(normalised_error(losses, target).mean(), torch.tensor(1.0).double())
    torch.testing.assert_close(normalised_error(losses.mean(), target), torch.tensor(1.0).double())

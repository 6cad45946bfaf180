"""Mixtures of experts beside a dense layer, transformers' expert parallel and torchtitan's."""

"""Evaluation: scores, calibration, detection and agreement, as functions of predictions or plain tensors."""

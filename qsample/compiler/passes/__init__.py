"""Graph passes: functions that change a model in place and say whether they did. Targets list them as phases."""

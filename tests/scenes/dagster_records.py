"""Dagster's records of runs, ticks and definitions, as JSON values."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import dagster as dg
from dagster import DagsterEventType

_IRRELEVANT_TAGS = (".dagster/", "dagster/")
Returned = Any


def run_record(instance: dg.DagsterInstance, result: dg.ExecuteInProcessResult) -> dict[str, Any]:
    """Return the record of a run: events with metadata, tags, failures and logs."""
    record: dict[str, Any] = {
        "success": result.success,
        "tags": _tags(instance, result.run_id),
        "materializations": {},
        "observations": {},
        "checks": {},
        "failures": {},
    }
    for event in result.all_events:
        match event.event_type:
            case DagsterEventType.ASSET_MATERIALIZATION:
                shown: Any = event.step_materialization_data.materialization
                record["materializations"][shown.asset_key.to_user_string()] = _shown(shown)
            case DagsterEventType.ASSET_OBSERVATION:
                shown = event.asset_observation_data.asset_observation
                record["observations"][shown.asset_key.to_user_string()] = _shown(shown)
            case DagsterEventType.ASSET_CHECK_EVALUATION:
                check = event.asset_check_evaluation_data
                record["checks"][check.check_name] = {
                    "passed": check.passed,
                    "severity": check.severity.value,
                    **_shown(check),
                }
            case DagsterEventType.STEP_FAILURE:
                record["failures"][str(event.step_key)] = _failure(event.step_failure_data)
            case _:
                pass
    return record | {"log": _log(instance, result.run_id)}


def tick_record(evaluate: Callable[[], Returned]) -> tuple[dict[str, Any], Returned | None]:
    """Evaluate a sensor or schedule; return its record and its result."""
    try:
        returned = evaluate()
    except Exception as error:  # noqa: BLE001 - it is recorded
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        return {"raised": {"type": type(cause).__name__, "message": str(cause)}}, None
    record = {
        "skip_message": returned.skip_message,
        "cursor": getattr(returned, "cursor", None),
        "requests": [
            {
                "run_key": request.run_key,
                "job_name": request.job_name,
                "partition_key": request.partition_key,
                "tags": _ours(request.tags),
            }
            for request in returned.run_requests or []
        ],
        "events": [
            {"type": type(event).__name__, "asset": event.asset_key.to_user_string()}
            | _shown(event)
            for event in getattr(returned, "asset_events", [])
        ],
    }
    return record, returned


def definitions_record(definitions: dg.Definitions) -> dict[str, dict[str, Any]]:
    """Describe assets, checks, jobs, sensors, schedules and resources."""
    graph = definitions.resolve_asset_graph()
    jobs = [job for job in definitions.resolve_all_job_defs() if not job.name.startswith("__")]
    return {
        "assets": {
            spec.key.to_user_string(): _asset(spec)
            for spec in sorted(definitions.resolve_all_asset_specs(), key=lambda each: each.key)
        },
        "checks": {
            key.name: {
                "asset": key.asset_key.to_user_string(),
                "description": graph.get(key).description,
                "blocking": graph.get(key).blocking,
            }
            for key in sorted(graph.asset_check_keys, key=lambda each: each.name)
        },
        "jobs": {job.name: _job(job) for job in sorted(jobs, key=lambda each: each.name)},
        "sensors": {
            sensor.name: {
                "description": sensor.description,
                "job": sensor.job_name,
                "interval_seconds": sensor.minimum_interval_seconds,
                "default_status": sensor.default_status.value,
            }
            for each in definitions.sensors or []
            for sensor in [definitions.resolve_sensor_def(each.name)]
        },
        "schedules": {
            schedule.name: {
                "description": schedule.description,
                "job": schedule.job_name,
                "cron": schedule.cron_schedule,
                "time_zone": schedule.execution_timezone,
                "default_status": schedule.default_status.value,
            }
            for each in definitions.schedules or []
            for schedule in [definitions.resolve_schedule_def(each.name)]
        },
        "resources": {
            name: {"type": type(resource).__name__, "description": type(resource).__doc__}
            for name, resource in (definitions.resources or {}).items()
        },
    }


def _asset(spec: dg.AssetSpec) -> dict[str, Any]:
    hours = spec.partitions_def
    return {
        "description": spec.description,
        "group": spec.group_name,
        "kinds": sorted(spec.kinds),
        "owners": list(spec.owners),
        "tags": _ours(spec.tags),
        "deps": sorted(dep.asset_key.to_user_string() for dep in spec.deps),
        "freshness_policy": str(spec.freshness_policy),
        "partitions": None
        if hours is None
        else {"type": type(hours).__name__, "end_offset": getattr(hours, "end_offset", None)},
        "metadata": {
            name: _value(value)
            for name, value in sorted(spec.metadata.items())
            if "io_m" not in name
        },
    }


def _job(job: dg.JobDefinition) -> dict[str, Any]:
    return {
        "description": job.description,
        "tags": dict(sorted(job.tags.items())),
        "executor": job.executor_def.name,
        "ops": {
            node.name: {
                "description": node.definition.description,
                "retries": str(getattr(node.definition, "retry_policy", None)),
                "pool": getattr(node.definition, "pool", None),
                "config": _fields(node.definition),
            }
            for node in sorted(job.nodes, key=lambda each: each.name)
        },
    }


def _fields(definition: Any) -> dict[str, Any]:
    schema = getattr(definition, "config_schema", None)
    fields = getattr(schema.config_type, "fields", None) if schema is not None else None
    return {
        name: {
            "type": _type_name(field.config_type),
            "required": field.is_required,
            "default": field.default_value if field.default_provided else None,
            "description": field.description,
        }
        for name, field in (fields or {}).items()
    }


def _type_name(config_type: Any) -> str:
    inner = getattr(config_type, "inner_type", None)
    if inner is not None:
        return f"{_type_name(inner)} or nothing"
    values = getattr(config_type, "config_values", None)
    if values is not None:
        return "one of " + ", ".join(config_type.config_values)
    return config_type.given_name or type(config_type).__name__


def _shown(event: Any) -> dict[str, Any]:
    return {
        "description": event.description,
        "metadata": {name: _value(value) for name, value in event.metadata.items()},
    }


def _value(value: Any) -> dict[str, Any]:
    kind = type(value).__name__.removesuffix("MetadataValue")
    match value:
        case dg.TableMetadataValue():
            return {
                "type": kind,
                "columns": _columns(value.schema),
                "rows": [dict(record.data) for record in value.records],
            }
        case dg.TableSchemaMetadataValue():
            return {"type": kind, "columns": _columns(value.schema)}
        case dg.TableSchema():
            return {"type": kind, "columns": _columns(value)}
        case dg.TimestampMetadataValue():
            return {"type": kind, "value": "<timestamp>"}
        case dg.MetadataValue():
            return {"type": kind, "value": _plain(value.value)}
        case _:
            return {"type": kind, "value": _plain(value)}


def _columns(schema: dg.TableSchema) -> list[str]:
    return [
        f"{column.name}: {column.type}" + (f" ({column.description})" if column.description else "")
        for column in schema.columns
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, dg.AssetKey):
        return value.to_user_string()
    return value if isinstance(value, str | int | float | bool | None | dict | list) else str(value)


def _failure(data: Any) -> dict[str, Any]:
    failure = data.user_failure_data
    if failure is None:
        return {"error": data.error_display_string.splitlines()[0]}
    return {
        "description": failure.description,
        "metadata": {name: _value(value) for name, value in failure.metadata.items()},
    }


def _tags(instance: dg.DagsterInstance, run_id: str) -> dict[str, str]:
    run = instance.get_run_by_id(run_id)
    assert run is not None
    return _ours(run.tags)


def _ours(tags: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value for name, value in sorted(tags.items()) if not name.startswith(_IRRELEVANT_TAGS)
    }


def _log(instance: dg.DagsterInstance, run_id: str) -> dict[str, list[str]]:
    """Return the log messages of a run, by step."""
    lines: defaultdict[str, list[str]] = defaultdict(list)
    for entry in instance.all_logs(run_id):
        if entry.dagster_event is None:
            level = {10: "debug", 20: "info", 30: "warning", 40: "error"}.get(
                int(entry.level), str(entry.level)
            )
            lines[str(entry.step_key)].append(f"{level}: {entry.user_message}")
    return dict(sorted(lines.items()))

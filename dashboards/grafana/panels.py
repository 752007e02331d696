"""Panels and variables that all Grafana dashboards share; grafana-foundation-sdk is needed to build, not to run.

Must always hold: a mean says that it is one and comes from sum and count; a quantile says its window and that it is
read from buckets; every panel has a description that says what it shows and what it cannot.
"""

from __future__ import annotations

from typing import Any, Final

from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, table, timeseries
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import heatmap as heatmap_models
from grafana_foundation_sdk.models import prometheus as prometheus_models

from dashboards.palette import LABEL_COLOURS
from telemetry import names

SOURCE: Final = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
STORE: Final = models.DataSourceRef(type_val="grafana", uid="-- Grafana --")  # Grafana's own store of annotations
OPEN_TRACE: Final = "A point in the heatmap is one request; its trace id opens the trace in Tempo."
QUANTILES: Final = (0.5, 0.9, 0.99)


def query(expr: str, legend: str, ref: str = "A", *, exemplar: bool = False, instant: bool = False) -> Any:
    """One PromQL query of a panel."""
    made = prometheus.Dataquery().expr(expr).legend_format(legend).ref_id(ref).datasource(SOURCE).exemplar(exemplar)
    return made.instant().format(prometheus_models.PromQueryFormat.TABLE) if instant else made.range()


def line(
    title: str, description: str, unit: str, *queries: tuple[str, str], width: int = 12, stack: bool = False
) -> Any:
    """A time series.  queries: PromQL and legend."""
    made = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .datasource(SOURCE)
        .unit(unit)
        .min(0)
        .span(width)
        .height(8)
        .fill_opacity(30 if stack else 8)
        .line_width(1.5)
        .show_points(common_models.VisibilityMode.NEVER)
        .tooltip(common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI))
        .legend(
            common.VizLegendOptions()
            .display_mode(common_models.LegendDisplayMode.LIST)
            .placement(common_models.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
    )
    if stack:
        made = made.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL))
    for place, (expr, legend) in enumerate(queries):
        made = made.with_target(query(expr, legend, chr(ord("A") + place)))
    for label, colour in LABEL_COLOURS.items():
        fixed = {"mode": "fixed", "fixedColor": colour}
        made = made.override_by_name(label, [models.DynamicConfigValue(id_val="color", value=fixed)])
    return made


def number(title: str, description: str, unit: str, expr: str, steps: tuple[tuple[float | None, str], ...]) -> Any:
    """One figure with its colour.  steps: from a value on, a colour; the first value is None."""
    thresholds = dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE)
    return (
        stat.Panel()
        .title(title)
        .description(description)
        .datasource(SOURCE)
        .unit(unit)
        .span(4)
        .height(4)
        .no_value("–")
        .color_mode(common_models.BigValueColorMode.VALUE)
        .graph_mode(common_models.BigValueGraphMode.AREA)
        .thresholds(thresholds.steps([models.Threshold(value=value, color=colour) for value, colour in steps]))
        .with_target(query(expr, ""))
    )


def heat(title: str, description: str, histogram: str, selector: str, width: int = 24) -> Any:
    """A classic histogram of seconds as time x latency, with its exemplars."""
    expr = f"sum by (le) (increase({histogram}_bucket{selector}[$__rate_interval]))"
    return (
        heatmap.Panel()
        .title(title)
        .description(f"{description} {OPEN_TRACE}")
        .datasource(SOURCE)
        .span(width)
        .height(10)
        .calculate(False)
        .color(
            heatmap.HeatmapColorOptions()
            .mode(heatmap_models.HeatmapColorMode.SCHEME)
            .scheme("Oranges")
            .scale(heatmap_models.HeatmapColorScale.EXPONENTIAL)
            .exponent(0.5)
            .steps(64)
        )
        .y_axis(heatmap.YAxisConfig().unit("s").axis_placement(common_models.AxisPlacement.LEFT))
        .cell_gap(1)
        .show_y_histogram()
        .exemplars_color("rgba(31,119,180,0.9)")
        .with_target(query(expr, "{{le}}", exemplar=True).format(prometheus_models.PromQueryFormat.HEATMAP))
    )


def rows(title: str, description: str, expr: str, *, width: int = 24, hidden: tuple[str, ...] = ()) -> Any:
    """A table of the newest value of each series, its labels as columns."""
    left_out = dict.fromkeys(("Time", "__name__", "instance", "job", *hidden), True)
    organise = models.DataTransformerConfig(id_val="organize", options={"excludeByName": left_out})
    return (
        table.Panel()
        .title(title)
        .description(description)
        .datasource(SOURCE)
        .span(width)
        .height(8)
        .with_target(query(expr, "", instant=True))
        .with_transformation(organise)
    )


def mean(name: str, selector: str, by: str) -> str:
    """PromQL: mean of a histogram over the panel's interval, from its sum and count."""
    parts = [f"sum by ({by}) (rate({name}_{part}{selector}[$__rate_interval]))" for part in ("sum", "count")]
    return f"{parts[0]} / ({parts[1]} > 0)"


def quantile(q: float, name: str, selector: str, by: str = "") -> str:
    """PromQL: a quantile read from buckets, over the panel's interval."""
    within = ", ".join(part for part in ("le", by) if part)
    return f"histogram_quantile({q:g}, sum by ({within}) (rate({name}_bucket{selector}[$__rate_interval])))"


def quantiles(name: str, selector: str) -> list[tuple[str, str]]:
    """p50, p90 and p99 with their legends."""
    return [(quantile(q, name, selector), f"p{q * 100:g}") for q in QUANTILES]


def board(uid: str, title: str, description: str, variables: tuple[str, ...]) -> Any:
    """An empty dashboard with our variables (of VARIABLES), annotations and links."""
    made = (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags(["tailspan"])
        .timezone("browser")
        .refresh("5s")
        .time("now-15m", "now")
        .readonly()
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .link(
            dashboard.DashboardLink("tailspan")
            .type(models.DashboardLinkType.DASHBOARDS)
            .tags(["tailspan"])
            .include_vars(True)
            .keep_time(True)
        )
    )
    for name in variables:
        made = made.with_variable(variable(name))
    for event in events():
        made = made.annotation(event)
    return made


#: variable -> what Prometheus is asked for its values, and its label on the page
VARIABLES: Final = {
    "model": (f"label_values({names.M_RUNNING}, model_name)", "Model"),
    "engine": (f'label_values({names.M_RUNNING}{{model_name=~"$model"}}, engine)', "Engine"),
    "run": (f"label_values({names.M_RUN_INFO}, run)", "Run"),
}
ENGINE: Final = '{model_name=~"$model",engine=~"$engine"}'


def variable(name: str) -> Any:
    """A variable of VARIABLES: any number of values, all of them at first."""
    asked, label = VARIABLES[name]
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .query({"query": asked, "refId": name, "qryType": 5})
        .datasource(SOURCE)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(models.VariableOption(selected=True, text="All", value="$__all"))
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_DESC if name == "run" else models.VariableSort.ALPHABETICAL_ASC)
    )


#: title -> (PromQL that is there while it holds, colour, text)
EVENTS: Final = {
    "A run begins": (f"{names.M_RUN_INFO} unless {names.M_RUN_INFO} offset 30s", "blue", "run {{run}}, SLO {{slo}}"),
    "Another build": (f"{names.M_BUILD_INFO} unless {names.M_BUILD_INFO} offset 1m", "purple",
                      "{{engine}}: version {{version}}, model {{model_sha}}"),
    "Alerts": ('ALERTS{alertname=~"Tailspan.*",alertstate="firing"}', "red", "{{alertname}} {{class}}{{instance}}"),
}  # fmt: skip
#: kind of event -> tag of the annotations that `tailspan grafana push` writes into Grafana's own store
MARKS: Final = {"run": "tailspan-run", "deploy": "tailspan-deploy", "fault": "tailspan-fault"}


def events() -> list[Any]:
    """Events that Prometheus knows, and those that were pushed."""
    made: list[Any] = []
    for title, (expr, colour, text) in EVENTS.items():
        one = dashboard.AnnotationQuery().name(title).datasource(SOURCE).enable(True).hide(False).icon_color(colour)
        built = one.expr(expr).build()
        extra = {"titleFormat": title, "textFormat": text, "step": "15s"}
        made.append(_Plain({**built.to_json(), **extra}))
    for kind, tag in MARKS.items():
        target = dashboard.AnnotationTarget().limit(100).match_any(False).tags([tag]).type("tags")
        one = dashboard.AnnotationQuery().name(f"Marked: {kind}").datasource(STORE).enable(True).hide(False)
        made.append(one.icon_color("orange").target(target))
    return made


class _Plain:
    """An annotation query with fields that the SDK does not know (titleFormat and textFormat of Prometheus)."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    def build(self) -> _Plain:
        return self

    def to_json(self) -> dict[str, Any]:
        return self._fields

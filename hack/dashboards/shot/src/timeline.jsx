// timeline.jsx: the panel "state timeline", which Grafana does not have in its library: rows of boxes over time, on the
// library's own plot, axes and legend.
import { useMemo } from 'react';
import { colorManipulator, formattedValueToString, getFieldDisplayName } from '@grafana/data';
import { AxisPlacement, ScaleDirection, ScaleOrientation } from '@grafana/schema';
import { FIXED_UNIT, UPlotChart, UPlotConfigBuilder, VizLayout, VizLegend, useTheme2 } from '@grafana/ui';

const PADDING = 4;

// Runs of one value: from its first sample to the next sample of another value, or to the end of what was sampled.
function runs(frame) {
  const [{ values: times, config: { interval } }, field] = frame.fields;
  const found = [];
  times.forEach((time, index) => {
    const last = found.at(-1);
    const value = field.values[index];
    // A sample is missing before this one.
    const connected = last && time - last.seen <= interval * 1.5;
    if (connected) last.end = time;
    if (connected && last.value === value) Object.assign(last, { seen: time, end: time + interval });
    else found.push({ value, start: time, seen: time, end: time + interval });
  });
  return found.filter(({ value }) => value !== null).map((run) => ({ ...run, display: field.display(run.value) }));
}

function drawRow(plot, row, middle, height, { options, fillOpacity, theme }) {
  const { ctx, bbox } = plot;
  for (const { start, end, display } of row) {
    const left = Math.max(plot.valToPos(start, 'x', true), bbox.left);
    const right = Math.min(plot.valToPos(end, 'x', true), bbox.left + bbox.width);
    if (right <= left) continue;
    ctx.fillStyle = colorManipulator.alpha(display.color, fillOpacity / 100);
    ctx.fillRect(left, middle - height / 2, right - left, height);
    const text = formattedValueToString(display);
    if (options.showValue === 'never' || ctx.measureText(text).width + 2 * PADDING > right - left) continue;
    ctx.fillStyle = theme.colors.getContrastText(display.color, 3);
    ctx.fillText(text, left + PADDING, middle);
  }
}

function configure({ rows, names, options, fillOpacity, theme, range, timeZone }) {
  const builder = new UPlotConfigBuilder(timeZone);
  const middles = (plot) => rows.map((_, index) => plot.bbox.top + (plot.bbox.height * (index + 0.5)) / rows.length);
  builder.addScale({
    scaleKey: 'x', isTime: true, orientation: ScaleOrientation.Horizontal, direction: ScaleDirection.Right,
    range: () => [range.from.valueOf(), range.to.valueOf()],
  });
  builder.addScale({
    scaleKey: FIXED_UNIT, isTime: false, orientation: ScaleOrientation.Vertical, direction: ScaleDirection.Up, range: [0, 1],
  });
  builder.addAxis({ scaleKey: 'x', isTime: true, placement: AxisPlacement.Bottom, timeZone, theme, grid: { show: true } });
  builder.addAxis({
    scaleKey: FIXED_UNIT, isTime: false, placement: AxisPlacement.Left, theme, grid: { show: false }, ticks: { show: false }, gap: 16,
    splits: (plot) => middles(plot).map((middle) => plot.posToVal((middle - plot.bbox.top) / devicePixelRatio, FIXED_UNIT)),
    values: () => names,
  });
  builder.addHook('draw', (plot) => {
    plot.ctx.save();
    plot.ctx.font = `500 ${Math.round(12 * devicePixelRatio)}px ${theme.typography.fontFamily}`;
    plot.ctx.textBaseline = 'middle';
    plot.ctx.textAlign = 'left';
    const height = (plot.bbox.height / rows.length) * options.rowHeight;
    middles(plot).forEach((middle, index) => drawRow(plot, rows[index], middle, height, { options, fillOpacity, theme }));
    plot.ctx.restore();
  });
  builder.setCursor({ show: false });
  return builder;
}

export function StateTimeline({ series, options, fieldConfig, range, timeZone, width, height }) {
  const theme = useTheme2();
  const { config, items, data } = useMemo(() => {
    if (options.alignValue !== 'left' || !options.mergeValues) throw new Error('a state timeline is drawn with merged values to the left only');
    const rows = series.map(runs);
    const names = series.map((frame) => getFieldDisplayName(frame.fields[1], frame, series));
    const { fillOpacity } = fieldConfig.defaults.custom;
    const shown = new Map(rows.flat().sort((a, b) => a.value - b.value).map(({ display }) => [display.text, display.color]));
    return {
      config: configure({ rows, names, options, fillOpacity, theme, range, timeZone }),
      items: [...shown].map(([label, color]) => ({ label, color, yAxis: 1 })),
      data: [[range.from.valueOf(), range.to.valueOf()]],
    };
  }, [series, options, fieldConfig, theme, range, timeZone]);
  const { legend } = options;
  const shownLegend = legend.showLegend ? (
    <VizLayout.Legend placement={legend.placement}>
      <VizLegend items={items} displayMode={legend.displayMode} placement={legend.placement} readonly />
    </VizLayout.Legend>
  ) : null;
  return (
    <VizLayout width={width} height={height} legend={shownLegend}>
      {(innerWidth, innerHeight) => <UPlotChart config={config} data={data} width={innerWidth} height={innerHeight} />}
    </VizLayout>
  );
}

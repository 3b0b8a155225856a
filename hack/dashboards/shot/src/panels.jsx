// panels.jsx: the drawing of each type of panel, with the components of Grafana's library.
import { useLayoutEffect } from 'react';
import { VizOrientation, getDisplayValueAlignmentFactors, getFieldDisplayValues } from '@grafana/data';
import { BarGauge, BigValue, TimeSeries, VizRepeater, useTheme2 } from '@grafana/ui';
import { TableNG } from '@grafana/ui/unstable';
import { StateTimeline } from './timeline.jsx';

const same = (text) => text;

// The reduced values of a panel of single numbers.
const displayValues = ({ fieldConfig, options, series, timeZone }, theme, sparkline) => getFieldDisplayValues({
  fieldConfig, reduceOptions: options.reduceOptions, replaceVariables: same, theme, data: series, sparkline, timeZone,
});

function Stat(panel) {
  const { options, series, range, width, height } = panel;
  const theme = useTheme2();
  const renderValue = ({ value, alignmentFactors, width: ownWidth, height: ownHeight, count }) => (
    <BigValue
      value={value.display} count={count} width={ownWidth} height={ownHeight} theme={theme} alignmentFactors={alignmentFactors}
      sparkline={value.sparkline && { ...value.sparkline, timeRange: range }} colorMode={options.colorMode}
      graphMode={options.graphMode} justifyMode={options.justifyMode} textMode={options.textMode} wideLayout={options.wideLayout}
    />
  );
  return (
    <VizRepeater
      getValues={() => displayValues(panel, theme, options.graphMode !== 'none')} getAlignmentFactors={getDisplayValueAlignmentFactors}
      renderValue={renderValue} width={width} height={height} source={series} itemSpacing={3} renderCounter={1} autoGrid
      orientation={options.orientation}
    />
  );
}

function Bars(panel) {
  const { options, series, width, height } = panel;
  const theme = useTheme2();
  const renderValue = ({ value, alignmentFactors, orientation, width: ownWidth, height: ownHeight, count }) => (
    <BarGauge
      value={count === 1 ? { ...value.display, title: undefined } : value.display} field={value.field}
      display={value.view?.getFieldDisplayProcessor(value.colIndex)} width={ownWidth} height={ownHeight} orientation={orientation}
      theme={theme} itemSpacing={options.displayMode === 'lcd' ? 2 : 10} displayMode={options.displayMode}
      alignmentFactors={alignmentFactors} showUnfilled={options.showUnfilled} valueDisplayMode={options.valueMode}
      namePlacement={options.namePlacement}
    />
  );
  return (
    <VizRepeater
      getValues={() => displayValues(panel, theme, false)} getAlignmentFactors={getDisplayValueAlignmentFactors} renderValue={renderValue} width={width}
      height={height} source={series} renderCounter={1} minVizWidth={options.minVizWidth} minVizHeight={options.minVizHeight}
      maxVizHeight={options.maxVizHeight} orientation={options.orientation ?? VizOrientation.Auto}
    />
  );
}

// Vertical lines with a mark at the times of the dashboard's annotations.
function Annotations({ config, annotations }) {
  const theme = useTheme2();
  useLayoutEffect(() => {
    config.addHook('draw', (plot) => {
      const { ctx, bbox } = plot;
      ctx.save();
      ctx.lineWidth = devicePixelRatio;
      for (const { time, color } of annotations) {
        const x = Math.round(plot.valToPos(time, 'x', true));
        if (x < bbox.left || x > bbox.left + bbox.width) continue;
        const bottom = bbox.top + bbox.height;
        ctx.strokeStyle = ctx.fillStyle = theme.visualization.getColorByName(color);
        ctx.setLineDash([5, 5]);
        ctx.beginPath();
        ctx.moveTo(x, bbox.top);
        ctx.lineTo(x, bottom);
        ctx.stroke();
        ctx.beginPath();
        ctx.moveTo(x, bottom);
        ctx.lineTo(x - 4, bottom + 6);
        ctx.lineTo(x + 4, bottom + 6);
        ctx.fill();
      }
      ctx.restore();
    });
  }, [config]);
  return null;
}

const Lines = ({ options, series, range, timeZone, width, height, annotations }) => (
  <TimeSeries frames={series} timeRange={range} timeZone={timeZone} width={width} height={height} legend={options.legend} options={options}>
    {(config) => <Annotations config={config} annotations={annotations} />}
  </TimeSeries>
);

const Rows = ({ options, fieldConfig, series, range, width, height }) => (
  <TableNG
    data={series[0]} width={width} height={height} noHeader={!options.showHeader} cellHeight={options.cellHeight} timeRange={range}
    fieldConfig={fieldConfig} sortBy={options.sortBy} enableVirtualization={false} structureRev={1} transparent={false}
  />
);

export const DRAWINGS = { stat: Stat, bargauge: Bars, timeseries: Lines, table: Rows, 'state-timeline': StateTimeline };

// Draws a dashboard's panels with the components that Grafana publishes (@grafana/ui, @grafana/data).
//
// window.DATA = {board, answers, from, to}: the dashboard, for each panel's id what a Prometheus
// answered to each of its targets, and the time range in unix seconds. Frames, overrides, transformations, units,
// colours and drawing are Grafana's; what a panel plugin adds (how a stat or a graph is laid out from
// them) is not published and is written out below with the plugins' defaults.
import React from 'react';
import {createRoot} from 'react-dom/client';
import {
  applyFieldOverrides, createTheme, dateTime, FieldType, getFieldDisplayValues, Registry,
  standardFieldConfigEditorRegistry, standardTransformers, standardTransformersRegistry,
  ThemeContext, toDataFrame, transformDataFrame,
} from '@grafana/data';
import {BigValue, GlobalStyles, PanelChrome, Table, TimeSeries, VizRepeater} from '@grafana/ui';

const COLUMN = 60, ROW = 30, GAP = 8;
const {board, answers, from, to} = window.DATA;
const theme = createTheme({colors: {mode: 'dark'}});
const range = {from: dateTime(from * 1000), to: dateTime(to * 1000)};
range.raw = {from: range.from, to: range.to};
const asItIs = (text) => text;

const editor = (id, isCustom = false) => ({
  id: isCustom ? `custom.${id}` : id, path: id, name: id, isCustom,
  editor: () => null, override: () => null, process: (value) => value, shouldApply: () => true, settings: {},
});
standardFieldConfigEditorRegistry.setInit(() => [
  'unit', 'min', 'max', 'decimals', 'displayName', 'color', 'thresholds', 'mappings', 'noValue',
].map((id) => editor(id)));
const transformers = [...new Map(Object.values(standardTransformers).map((one) => [one.id, one])).values()];
standardTransformersRegistry.setInit(() => transformers.map((one) => ({
  id: one.id, name: one.name, transformation: one, editor: () => null, description: '',
})));

// Turn what a Prometheus answers into frames, as Grafana's data source does.
function frames(target, series) {
  const time = (points) => ({name: 'Time', type: FieldType.time, values: points.map((one) => one[0] * 1000)});
  if (target.format === 'table') {
    const labels = [...new Set(series.flatMap((one) => Object.keys(one.metric)))].sort();
    const texts = labels.map((name) => ({
      name, type: FieldType.string, config: {}, values: series.map((one) => one.metric[name] ?? ''),
    }));
    const value = {name: `Value #${target.refId}`, type: FieldType.number, values: series.map((one) => +one.value[1])};
    const fields = series.length ? [time(series.map((one) => one.value)), ...texts, value] : [];
    return [toDataFrame({refId: target.refId, fields})];
  }
  return series.map(({metric, values, value}) => {
    const points = values ?? [value];
    const name = (target.legendFormat ?? '').replace(/\{\{\s*(\w+)\s*\}\}/g, (_, label) => metric[label] ?? '');
    return toDataFrame({refId: target.refId, fields: [time(points), {
      name: 'Value', type: FieldType.number, labels: metric, values: points.map((one) => +one[1]),
      config: name ? {displayNameFromDS: name} : {},
    }]});
  });
}

const GRAPH = {
  drawStyle: 'line', lineInterpolation: 'linear', lineWidth: 1, fillOpacity: 0, gradientMode: 'none',
  showPoints: 'auto', pointSize: 5, axisPlacement: 'auto', axisColorMode: 'text', spanNulls: false,
  scaleDistribution: {type: 'linear'}, stacking: {mode: 'none', group: 'A'}, thresholdsStyle: {mode: 'off'},
  hideFrom: {legend: false, tooltip: false, viz: false}, axisLabel: '',
};

function prepared(panel) {
  const {defaults, overrides} = panel.fieldConfig, isGraph = panel.type === 'timeseries';
  const steps = defaults.thresholds?.steps ?? [{color: 'green', value: null}, {color: 'red', value: 80}];
  const all = {
    color: {mode: isGraph ? 'palette-classic' : 'thresholds'}, ...defaults,
    thresholds: {mode: 'absolute', steps: steps.map((one) => ({...one, value: one.value ?? -Infinity}))},
    custom: {...(isGraph ? GRAPH : {align: 'auto', cellOptions: {type: 'auto'}}), ...defaults.custom},
  };
  const fieldConfigRegistry = new Registry(() => [
    ...standardFieldConfigEditorRegistry.list(), ...Object.keys(all.custom).map((id) => editor(id, true)),
  ]);
  const data = panel.targets.flatMap((target, number) => frames(target, answers[panel.id][number]));
  return new Promise((done) => transformDataFrame(panel.transformations ?? [], data).subscribe((found) => done(
    applyFieldOverrides({data: found, theme, fieldConfig: {defaults: all, overrides}, replaceVariables: asItIs,
      timeZone: 'utc', fieldConfigRegistry}))));
}

function Inside({panel, data, width, height}) {
  const {type, options, fieldConfig} = panel;
  if (!data.some((one) => one.length)) return <div>No data</div>;
  if (type === 'table') return <Table data={data[0]} width={width} height={height} />;
  if (type === 'stat') {
    const values = getFieldDisplayValues({fieldConfig, reduceOptions: options.reduceOptions, data, theme,
      replaceVariables: asItIs, sparkline: false, timeZone: 'utc'});
    const one = ({value, ...size}) => <BigValue theme={theme} {...size} value={value.display}
      colorMode={options.colorMode} graphMode={options.graphMode} textMode={options.textMode} justifyMode="auto" />;
    return <VizRepeater source={data} getValues={() => values} renderValue={one} renderCounter={0} autoGrid
      orientation="auto" width={width} height={height} />;
  }
  const legend = {showLegend: true, displayMode: 'list', placement: 'bottom', calcs: [], ...options.legend};
  return <TimeSeries frames={data} legend={legend} timeRange={range} timeZone="utc" structureRev={1}
    width={width} height={height} />;
}

function Panel({panel, data}) {
  const {x, y, w, h} = panel.gridPos;
  return <div style={{position: 'absolute', left: x * COLUMN, top: y * (ROW + GAP)}}>
    <PanelChrome title={panel.title} width={w * COLUMN - GAP} height={h * (ROW + GAP) - GAP}
      padding={panel.type === 'table' ? 'none' : 'md'}>
      {(width, height) => <Inside panel={panel} data={data} width={width} height={height} />}
    </PanelChrome></div>;
}

async function main() {
  const data = await Promise.all(board.panels.map(prepared));
  createRoot(document.getElementById('root')).render(<ThemeContext.Provider value={theme}><GlobalStyles />
    {board.panels.map((panel, number) => <Panel key={panel.id} panel={panel} data={data[number]} />)}
  </ThemeContext.Provider>);
}
main().catch((error) => { document.body.innerText = error.stack; });

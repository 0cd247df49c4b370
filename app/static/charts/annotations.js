// What happened at single steps: skips, spikes of the loss, values that are not finite, resumptions. Draws nothing
// itself.
import { count as countText, number } from 'formats'
import { merged } from 'decimation'

const TICK = 9 // pixels of a tick at a skipped step
const LETTER = 6 // pixels of a digit on it
/** Ticks whose counts are written: more would cover the curves. */
const MOST_COUNTED = 10
const MARK = 9 // pixels of a mark at an edge
const MOST_MARKED = 8 // lines whose marks are as close as one may be to the next
/**
 * Values that are not finite: name, sign in a legend, and what the sign is as a path around x, y.
 * @type {[string|null, string, string, (x: number, y: number, width: number, height: number) => string][]}
 */
const NONFINITE = [
  ['NaN', 'NaN', '✕', (x, y, w, h) => `M${x - w},${y - h}L${x + w},${y + h}M${x - w},${y + h}L${x + w},${y - h}`],
  ['Infinity', '∞', '▲', (x, y, w, h) => `M${x - w},${y - h}H${x + w}L${x},${y + h}Z`],
  ['-Infinity', '−∞', '▼', (x, y, w, h) => `M${x - w},${y + h}H${x + w}L${x},${y - h}Z`],
  [null, 'not finite', '□', (x, y, w, h) => `M${x - w},${y - h}H${x + w}V${y + h}H${x - w}Z`],
]
/** Signs of values that are not finite, by name. @type {Record<string, [string, string]>} */
export const NONFINITE_SIGNS = Object.fromEntries(NONFINITE.map(([, name, sign]) => [name, [sign, name]]))

/**
 * Return the marks on a plot of `inner` pixels height, in Plotly's format.
 * @param {import('points').Points} points @param {import('url_state').View} view
 * @param {number} inner @param {Record<string, string>} colors @param {import('decimation').Screen} screen
 * @param {{isTicked: boolean, isLoss: boolean, lines: MarkedLine[]}} panel isTicked: it shows ticks of skipped steps;
 *   isLoss: and what happened to the loss
 */
export const marksOf = (points, view, inner, colors, screen, { isTicked, isLoss, lines }) => {
  const skips = merged(points.skips, points.x(points.skips.steps, view.x), screen)
  const foot = isTicked ? TICK : 0
  const nonfinite = nonfiniteMarks(lines, screen, inner, foot)
  const spikes = points.spikes.filter(({ step }) => points.first <= step && step <= points.last)
  const resumed = resumedSteps(points)
  const resumedAt = points.x([...resumed.keys()], view.x)
  return {
    shapes: [
      ...(isTicked
        ? [
            vertical(
              skips.map(({ x }) => x),
              [0, TICK / inner],
              { color: colors.skip, width: 1.5 },
            ),
          ]
        : []),
      vertical(resumedAt, [0, 1], { color: colors.quiet, width: 1, dash: 'dot' }),
      ...nonfinite.shapes,
    ].filter(({ path }) => path),
    traces: [
      hoverTrace(
        'skipped',
        skips.map(({ x }) => x),
        skips.map((tick) => tickText(tick, 'step', 'steps from')),
      ),
      hoverTrace(
        'resumed',
        resumedAt,
        [...resumed].map(([step, attempts]) => `attempt ${attempts.join(', ')}, after step ${countText(step)}`),
      ),
      ...(isLoss
        ? [
            skipCounts(skips, (foot + 1 + (nonfinite.shapes.length && MARK)) / inner, colors, screen),
            spikesOf(
              spikes,
              points.x(
                spikes.map(({ step }) => step),
                view.x,
              ),
              inner,
              colors,
            ),
          ]
        : []),
      ...nonfinite.traces,
    ],
  }
}

/**
 * Return the known attempts by the step after which they resumed.
 * @param {import('points').Points} points
 * @returns {Map<number, string[]>}
 */
const resumedSteps = ({ resumptions, first, last }) => {
  const within = Object.entries(resumptions).filter(([, step]) => first <= step + 1 && step <= last)
  const steps = new Map()
  for (const [attempt, step] of within.sort(([, a], [, b]) => a - b))
    steps.set(step, [...(steps.get(step) ?? []), attempt])
  return steps
}

/** Vertical lines as one path: one trace element each costs ten times as much. */
const vertical = (at, [low, high], line) => ({
  type: 'path',
  xref: 'x',
  yref: 'paper',
  line,
  path: at.map((x) => `M${x},${low}V${high}`).join(''),
})

/** Invisible trace with the crosshair's texts at these positions. */
const hoverTrace = (name, x, text) => ({
  x,
  y: x.map(() => 0),
  text,
  name,
  mode: 'none',
  type: 'scatter',
  hoverinfo: 'skip',
})

/** @param {import('decimation').Tick} tick @param {string} one @param {string} many */
const tickText = ({ count, first, last }, one, many) =>
  count === 1
    ? `${one} ${countText(first)}`
    : `${countText(count)} ${many} ${countText(first)}${last > first ? ` to ${countText(last)}` : ''}`

/** Counts of the ticks that stand for the most skips, where there is room; hovering shows the others. */
const skipCounts = (ticks, y, colors, { range, pixels }) => {
  const pixel = (range[1] - range[0]) / pixels || 1
  let free = -Infinity
  const largest = ticks
    .filter(({ count }) => count > 1)
    .sort((a, b) => b.count - a.count)
    .slice(0, MOST_COUNTED)
  const shown = largest
    .sort((a, b) => a.x - b.x)
    .filter(({ x, count }) => {
      if (x < free) return false
      free = x + pixel * (LETTER * (countText(count).length + 2.5))
      return true
    })
  return {
    x: shown.map(({ x }) => x),
    y: shown.map(() => y),
    text: shown.map(({ count }) => `×${countText(count)}`),
    textposition: 'top center',
    textfont: { size: 10, color: colors.skip },
    name: 'skips counted',
    mode: 'text',
    type: 'scatter',
    hoverinfo: 'skip',
    cliponaxis: false,
  }
}

/** @param {import('points').Spike[]} spikes */
const spikesOf = (spikes, at, inner, colors) => ({
  x: at,
  y: at.map(() => 1 - 6 / inner),
  text: spikes.map(({ step, loss, z }) => `${number(loss)} at step ${countText(step)}, z ${number(z)}`),
  name: 'loss spike',
  mode: 'markers',
  type: 'scatter',
  hoverinfo: 'skip',
  marker: { symbol: 'diamond', size: 8, color: colors.skip },
})

/** @typedef {{label: string, color: string, nonfinite?: import('points').Nonfinite & {x: number[]}}} MarkedLine */

/**
 * Marks of values that are not finite: +∞ at the upper edge of a plot, others at the lower one. Paths, as those of
 * ticks; traces have the texts, one for each of these values.
 * @param {MarkedLine[]} lines
 * @param {import('decimation').Screen} screen
 * @param {number} inner pixels of the plot's height
 * @param {number} foot pixels of what else is at its lower edge
 */
export const nonfiniteMarks = (lines, { range: [low, high], pixels }, inner, foot) => {
  const marked = lines.filter(({ nonfinite }) => nonfinite)
  const screen = {
    range: /** @type {[number, number]} */ ([low, high]),
    pixels: pixels / (MARK * Math.max(1, marked.length / MOST_MARKED)),
  }
  const marks = marked.flatMap(({ label, color, nonfinite }) =>
    nonfinite ? merged(nonfinite, nonfinite.x, screen).map((tick) => ({ ...tick, label, color })) : [],
  )
  const [width, height] = [(((high - low) / pixels) * MARK) / 2, MARK / 2 / inner]
  const of = NONFINITE.map(([value, name, sign, outline]) => ({
    name,
    sign,
    outline,
    own: marks.filter((mark) => mark.value === value),
    y: value === 'Infinity' ? 1 - 6 / inner : (foot + 6) / inner,
  })).filter(({ own }) => own.length)
  return {
    shapes: of.flatMap(({ name, sign, own, y, outline }) =>
      [...Map.groupBy(own, ({ color }) => color)].map(([color, some]) => ({
        type: 'path',
        xref: 'x',
        yref: 'paper',
        name,
        line: { color, width: 1.5 },
        ...('▲▼'.includes(sign) && { fillcolor: color }),
        // Whole at the ends, too, where a run may have lost its loss.
        path: some.map(({ x }) => outline(Math.max(Math.min(x, high - width), low + width), y, width, height)).join(''),
      })),
    ),
    traces: of.map(({ name, own }) =>
      hoverTrace(
        name,
        own.map(({ x }) => x),
        own.map(
          (mark) => `${mark.label} ${name}${mark.count === 1 ? ' at' : ':'} ${tickText(mark, 'step', 'steps from')}`,
        ),
      ),
    ),
  }
}

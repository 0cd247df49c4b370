// What happened at single steps: skips, losses that spiked or are not finite, resumptions. Draws nothing itself.
import { count as countText, number } from 'formats'
import { merged } from 'decimation'

const TICK = 9 // pixels of a tick at a skipped step
const LETTER = 6 // pixels of a digit on it

/**
 * Marks on a plot that is `inner` pixels high, as Plotly wants them.
 * @param {import('points').Points} points @param {import('url_state').View} view
 * @param {number} inner @param {Record<string, string>} colors @param {import('decimation').Screen} screen
 * @param {{isTicked: boolean, isLoss: boolean}} panel isTicked: it shows ticks of skipped steps; isLoss: and what happened to the loss
 */
export const marksOf = (points, view, inner, colors, screen, { isTicked, isLoss }) => {
  const skips = merged(points.skips, points.x(points.skips.steps, view.x), screen)
  const nonfinite = merged(points.nonfinite, points.x(points.nonfinite.steps, view.x), screen)
  const spikes = points.spikes.filter(({ step }) => points.first <= step && step <= points.last)
  const resumed = resumedSteps(points)
  const resumedAt = points.x([...resumed.keys()], view.x)
  return {
    shapes: [
      ...(isTicked ? [vertical(skips.map(({ x }) => x), [0, TICK / inner], { color: colors.skip, width: 1.5 })] : []),
      vertical(resumedAt, [0, 1], { color: colors.quiet, width: 1, dash: 'dot' }),
    ].filter(({ path }) => path),
    traces: [
      hoverTrace('skipped', skips.map(({ x }) => x), skips.map((tick) => tickText(tick, 'step', 'steps from'))),
      hoverTrace('resumed', resumedAt, [...resumed].map(([step, attempts]) => `attempt ${attempts.join(', ')}, after step ${countText(step)}`)),
      ...(isLoss ? [
        skipCounts(skips, inner, colors, screen),
        spikesOf(spikes, points.x(spikes.map(({ step }) => step), view.x), inner, colors),
        nonfiniteLosses(nonfinite, points.words, inner, colors),
      ] : []),
    ],
  }
}

/** Attempts by the step that they resumed after, of those that points know. @param {import('points').Points} points @returns {Map<number, string[]>} */
const resumedSteps = ({ resumptions, first, last }) => {
  const within = Object.entries(resumptions).filter(([, step]) => first <= step + 1 && step <= last)
  const steps = new Map()
  for (const [attempt, step] of within.sort(([, a], [, b]) => a - b)) steps.set(step, [...(steps.get(step) ?? []), attempt])
  return steps
}

/** Vertical lines as one path: one trace element each costs ten times as much. */
const vertical = (at, [low, high], line) => ({
  type: 'path', xref: 'x', yref: 'paper', line, path: at.map((x) => `M${x},${low}V${high}`).join(''),
})

/** Invisible trace with the crosshair's texts at these positions. */
const hoverTrace = (name, x, text) => ({ x, y: x.map(() => 0), text, name, mode: 'none', type: 'scatter', hoverinfo: 'skip' })

/** @param {import('decimation').Tick} tick @param {string} one @param {string} many */
const tickText = ({ count, first, last }, one, many) => (count === 1
  ? `${one} ${countText(first)}`
  : `${countText(count)} ${many} ${countText(first)}${last > first ? ` to ${countText(last)}` : ''}`)

/** Counts of ticks that stand for several skips, where there is room; hovering shows the others. */
const skipCounts = (ticks, inner, colors, { range, pixels }) => {
  const pixel = (range[1] - range[0]) / pixels || 1
  let free = -Infinity
  const shown = ticks.filter(({ x, count }) => {
    if (count === 1 || x < free) return false
    free = x + pixel * (LETTER * (countText(count).length + 1.5))
    return true
  })
  return {
    x: shown.map(({ x }) => x), y: shown.map(() => (TICK + 1) / inner),
    text: shown.map(({ count }) => countText(count)), textposition: 'top center', textfont: { size: 10, color: colors.skip },
    name: 'skips counted', mode: 'text', type: 'scatter', hoverinfo: 'skip', cliponaxis: false,
  }
}

/** @param {import('points').Spike[]} spikes */
const spikesOf = (spikes, at, inner, colors) => ({
  x: at, y: at.map(() => 1 - 6 / inner),
  text: spikes.map(({ step, loss, z }) => `${number(loss)} at step ${countText(step)}, z ${number(z)}`),
  name: 'loss spike', mode: 'markers', type: 'scatter', hoverinfo: 'skip',
  marker: { symbol: 'diamond', size: 8, color: colors.skip },
})

const nonfiniteLosses = (ticks, words, inner, colors) => ({
  x: ticks.map(({ x }) => x),
  y: ticks.map(() => 1 - 6 / inner),
  text: ticks.map((tick) => (tick.count === 1 && words.has(tick.first)
    ? `loss ${words.get(tick.first)} at step ${countText(tick.first)}` : tickText(tick, 'step', 'steps from'))),
  name: 'loss not finite', mode: 'markers', type: 'scatter', hoverinfo: 'skip',
  marker: { symbol: 'triangle-up', size: 9, color: colors.skip },
})

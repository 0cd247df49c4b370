// The numbers of one run: lines by step, ticks where something happened, metrics; updated from
// the live stream.

/**
 * @typedef {{steps: number[], counts: number[], values: (string|null)[]}} Nonfinite values: "NaN", "Infinity" or
 *   "-Infinity"; null: any of these, in a bucket
 * @typedef {{x: number[], y: (number|null)[], nonfinite?: Nonfinite}} Line y: null is unknown or not finite
 * @typedef {'step'|'applied'|'time'|'examples'|`metric:${string}`} Axis what x counts
 * @typedef {{steps: number[], counts: number[]}} Ticks
 * @typedef {{x: number[]|null, y: any[], mean_x: number[]|null, mean_y: any[], nonfinite?: Ticks|null}} SentLine null:
 *   the page's
 * @typedef {{step: number, loss: number|string|null, z: number|string}} Spike
 * @typedef {{
 *   parent_step: number,
 *   first: number,
 *   total: number,
 *   bucket: number,
 *   x: number[],
 *   mean_x: number[],
 *   series: Record<string, SentLine>,
 *   metrics: Record<string, {x: number[], y: any[], mean_x: number[], nonfinite?: Ticks|null}>,
 *   skips: Ticks & {before: number},
 *   resumptions: Record<string, number>,
 *   spikes: Spike[],
 *   examples?: {before: number, each: number}|null
 * }} Page
 */

/** Before the name of a metric that x counts. */
export const METRIC = 'metric:'
const SKIPPED = 1
const isNumber = (value) => typeof value === 'number'
/**
 * Append values to a line. A value that is not finite is a text, null is unknown: neither can be drawn.
 * @param {Line} line
 * @param {number[]} steps
 * @param {any[]} values
 */
const append = (line, steps, values) => {
  values.forEach((value, i) => {
    line.x.push(steps[i])
    line.y.push(isNumber(value) ? value : null)
    if (typeof value !== 'string') return
    line.nonfinite ??= { steps: [], counts: [], values: [] }
    line.nonfinite.steps.push(steps[i])
    line.nonfinite.counts.push(1)
    line.nonfinite.values.push(value)
  })
}
/** Remove what a line has from a step on. @param {Line} line @param {number} step */
const cut = ({ x, y, nonfinite }, step) => {
  x.length = y.length = position(x, step)
  if (nonfinite)
    nonfinite.steps.length = nonfinite.counts.length = nonfinite.values.length = position(nonfinite.steps, step)
}
/** @param {number[]} x @param {any[]} y @param {Ticks|null} [nonfinite] of buckets @returns {Line} */
const lineOf = (x, y, nonfinite) => {
  /** @type {Line} */
  const line = { x: [], y: [] }
  if (nonfinite)
    line.nonfinite = {
      steps: [...nonfinite.steps],
      counts: [...nonfinite.counts],
      values: nonfinite.counts.map(() => null),
    }
  append(line, x, y)
  return line
}

/** First index whose value is at least `wanted`. @param {number[]} sorted @param {number} wanted */
export const position = (sorted, wanted) => {
  let [low, high] = [0, sorted.length]
  while (low < high) {
    const middle = (low + high) >> 1
    if (sorted[middle] < wanted) low = middle + 1
    else high = middle
  }
  return low
}

export class Points {
  /** @param {Page} page of the whole run */
  constructor(page) {
    this.setPage(page, [1, Infinity])
  }

  /** @type {Map<string, Line & {isWhole: boolean}>} */
  metrics = new Map()
  /** Names of all metrics, also of those without points here. @type {Set<string>} */
  names = new Set()
  /** Steps that were asked for, the first and the last. @type {[number, number]} */
  asked = [1, Infinity]
  /** Last step of a fork's parent. */
  parentStep = 0
  first = 1
  total = 0
  /** Steps of each. */
  bucket = 1
  /** Steps that were skipped, and how many before these. @type {Ticks & {before: number}} */
  skips = { steps: [], counts: [], before: 0 }
  /** Last step before each attempt. @type {Record<string, number>} */
  resumptions = {}
  /** Spikes of the loss. @type {Spike[]} */
  spikes = []
  /** Examples per step, and before the first one. @type {{before: number, each: number}|null} */
  examples = null
  /** @type {Record<string, Line>} */
  lines = {}
  /** Means of the buckets of lines. @type {Record<string, Line>} */
  means = {}

  /**
   * Take other points of the same run, as for a zoom.
   * @param {Page} page
   * @param {[number, number]} asked steps that it was asked for
   */
  setPage(page, asked) {
    this.asked = asked
    this.parentStep = page.parent_step
    this.first = page.first
    this.total = page.total
    this.bucket = page.bucket
    this.skips = page.skips
    this.resumptions = page.resumptions
    this.spikes = page.spikes
    this.examples = page.examples ?? null
    this.lines = {}
    this.means = {}
    for (const [name, { x, y, mean_x: meanX, mean_y: meanY, nonfinite }] of Object.entries(page.series)) {
      this.lines[name] = lineOf(x ?? page.x, y, nonfinite)
      if (meanY.length) this.means[name] = lineOf(meanX ?? page.mean_x, meanY)
    }
    this.setMetrics(page.metrics)
  }

  /** Take points of metrics, of the steps that were asked for. @param {Page['metrics']} metrics */
  setMetrics(metrics) {
    for (const [name, { x, y, mean_x: meanX, nonfinite }] of Object.entries(metrics)) {
      // Of a metric measured now and then all points are here; a part of it would break the line.
      if (this.metrics.get(name)?.isWhole) continue
      this.names.add(name)
      this.metrics.set(name, { ...lineOf(x, y, nonfinite), isWhole: this.isWhole && !meanX.length && !nonfinite })
    }
  }

  /** Let all points of metrics be replaced. */
  expireMetrics() {
    for (const line of this.metrics.values()) line.isWhole = false
  }

  get count() {
    return Math.max(...Object.values(this.lines).map(({ x }) => x.length))
  }
  /** The last step: in buckets other lines end before it where they are no longer finite. */
  get last() {
    return this.lines.elapsed_ms.x.at(-1) ?? 0
  }
  /** Return the end of the charts; for a run that only logs, its last metric. */
  get end() {
    return this.last || Math.max(0, ...[...this.metrics.values()].map(({ x }) => x.at(-1) ?? 0))
  }
  /**
   * Return the end of a panel: metrics may have a point after the last step, as a result of the whole run.
   * @param {string[]} names
   * @returns {number}
   */
  endOf(names) {
    return Math.max(this.end, ...names.map((name) => this.metrics.get(name)?.x.at(-1) ?? 0))
  }
  /** Return the start of the charts; metrics may have a point before the first step. */
  get begin() {
    return Math.min(
      this.first,
      ...(this.asked[0] <= 1 ? [...this.metrics.values()].map(({ x }) => x[0] ?? this.first) : []),
    )
  }
  /** Return whether the data wait of steps is known. */
  get hasWaits() {
    return this.lines.data_us.y.some(isNumber)
  }
  get isWhole() {
    return this.asked[0] <= 1 && this.asked[1] === Infinity
  }

  /** Return whether all steps of a range are here. @param {[number, number]} range */
  hasAll([first, last]) {
    return this.bucket === 1 && this.asked[0] <= first && last <= this.asked[1]
  }

  /** Return the number of skipped steps in a range. @param {[number, number]} range */
  countSkips([first, last]) {
    const { steps, counts } = this.skips
    const within = counts.slice(position(steps, first), position(steps, Math.floor(last) + 1))
    return within.reduce((sum, n) => sum + n, 0)
  }

  /**
   * Replace everything from the first new step on, except buckets, which have it already.
   * @param {Record<string, any[]>} steps
   */
  addSteps(steps) {
    const begin = position(steps.step, this.bucket > 1 ? this.last + 1 : this.asked[0])
    const end = position(steps.step, this.asked[1] + 1)
    if (begin === end) return
    const first = steps.step[begin]
    const added = Object.fromEntries(Object.entries(steps).map(([name, values]) => [name, values.slice(begin, end)]))
    this.first = Math.min(this.first, first)
    for (const [name, line] of [...Object.entries(this.lines), ...Object.entries(this.means)]) {
      cut(line, first)
      append(line, added.step, added[name])
    }
    this.total = this.last - this.first + 1
    const { steps: skipped, counts } = this.skips
    skipped.length = counts.length = position(skipped, first)
    const happened = added.step.filter((_, i) => added.flags[i] & SKIPPED)
    skipped.push(...happened)
    counts.push(...happened.map(() => 1))
  }

  /** @param {{name: string, step: number, value: number|string|null}[]} metrics in order */
  addMetrics(metrics) {
    for (const { name, step, value } of metrics) {
      if (!this.names.has(name)) this.setMetrics({ [name]: { x: [], y: [], mean_x: [] } })
      const line = this.metrics.get(name)
      if (!line) continue // its earlier points are not here
      cut(line, step)
      append(line, [step], [value])
    }
  }

  /**
   * Values of a line that are not finite with where they stand on the x axis; undefined: there are none.
   * @param {Nonfinite|undefined} nonfinite
   * @param {Axis} mode
   * @returns {(Nonfinite & {x: number[]})|undefined}
   */
  nonfiniteAt(nonfinite, mode) {
    return nonfinite?.steps.length ? { ...nonfinite, x: this.x(nonfinite.steps, mode) } : undefined
  }

  /**
   * Return the x positions of sorted steps; none by examples if these are unknown.
   * @param {number[]} steps
   * @param {Axis} mode
   * @returns {number[]}
   */
  x(steps, mode) {
    if (mode === 'examples') {
      const { before, each } = this.examples ?? {}
      return before !== undefined && each !== undefined
        ? steps.map((step) => before + (step - this.parentStep) * each)
        : []
    }
    if (mode.startsWith(METRIC)) return this.metricAt(steps, mode.slice(METRIC.length))
    if (mode === 'time') return steps.map((step) => this.seconds(step))
    if (mode === 'step') return steps
    let [next, others] = [0, this.parentStep + this.skips.before] // that applied none of its own
    return steps.map((step) => {
      while (this.skips.steps[next] <= step) others += this.skips.counts[next++]
      return step - others
    })
  }

  /**
   * Return a metric's values at steps: interpolated between its points, extrapolated at its mean pace; the steps if
   * unknown.
   * @param {number[]} steps
   * @param {string} name
   * @returns {number[]}
   */
  metricAt(steps, name) {
    const { x, y } = this.known(name)
    if (!x.length) return steps
    const end = x.length - 1
    const pace = end ? (y[end] - y[0]) / (x[end] - x[0]) : 0
    return steps.map((step) => {
      const i = position(x, step)
      if (x[i] === step) return y[i]
      if (i === 0) return Math.max(y[0] - pace * (x[0] - step), Math.min(y[0], 0))
      if (i > end) return y[end] + pace * (step - x[end])
      return y[i - 1] + ((step - x[i - 1]) / (x[i] - x[i - 1])) * (y[i] - y[i - 1])
    })
  }

  /** Return whether the positions of steps on an x axis are known. @param {Axis} mode */
  hasAxis(mode) {
    if (mode.startsWith(METRIC)) return this.known(mode.slice(METRIC.length)).x.length > 0
    return mode !== 'examples' || Boolean(this.examples)
  }

  /** The points of a metric that are numbers. @param {string} name @returns {{x: number[], y: number[]}} */
  known(name) {
    const { x, y } = this.metrics.get(name) ?? { x: [], y: [] }
    const there = y.flatMap((value, i) => (value === null ? [] : [i]))
    return { x: there.map((i) => x[i]), y: there.map((i) => Number(y[i])) }
  }

  /** Seconds from the run's start to a step. @param {number} step */
  seconds(step) {
    const { x, y } = this.lines.elapsed_ms
    const i = Math.min(position(x, step), x.length - 1)
    if (i <= 0 || x[i] === step) return (y[Math.max(i, 0)] ?? 0) / 1000
    const share = (step - x[i - 1]) / (x[i] - x[i - 1])
    const [before, after] = [y[i - 1] ?? 0, y[i] ?? 0] // every step has its time
    return (before + share * (after - before)) / 1000
  }

  /**
   * Return the steps that a stretch of the x axis covers; beyond the loaded points it assumes their mean pace.
   * @param {[number, number]} range
   * @param {Axis} mode
   * @returns {[number, number]}
   */
  steps(range, mode) {
    const steps = mode.startsWith(METRIC) ? this.known(mode.slice(METRIC.length)).x : this.lines.elapsed_ms.x
    if (mode === 'step' || steps.length < 2) return range
    const at = this.x(steps, mode)
    const end = steps.length - 1
    /** @param {number} x */
    const stepOf = (x) => {
      const i = position(at, x)
      const [a, b] = i > 0 && i <= end ? [i - 1, i] : [0, end]
      return steps[a] + ((x - at[a]) / (at[b] - at[a] || 1)) * (steps[b] - steps[a])
    }
    return [stepOf(range[0]), stepOf(range[1])]
  }
}

/**
 * Exponential moving average without its start's bias; gaps stay gaps.
 * @param {(number|null)[]} values
 * @param {number} weight
 */
export const smoothed = (values, weight) => {
  let [sum, norm] = [0, 0]
  return values.map((value) => {
    if (value === null) return null
    sum = weight * sum + (1 - weight) * value
    norm = weight * norm + (1 - weight)
    return sum / norm
  })
}

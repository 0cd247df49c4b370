// The numbers of one run: lines by step, every flagged step, metrics; brought up to date by news.

/**
 * @typedef {{x: number[], y: (number|null)[]}} Line
 * @typedef {{first: number, last: number, total: number, bucket: number, series: Record<string, Line>}} Page
 */

const SKIPPED = 1
const NONFINITE_LOSS = 2
const isNumber = (value) => typeof value === 'number'
/** Infinities come as words, and charts leave a gap for them as for a NaN. */
const drawable = (values) => values.map((value) => (isNumber(value) ? value : null))

/** First index whose value is at least `wanted`. @param {number[]} sorted @param {number} wanted */
const position = (sorted, wanted) => {
  let [low, high] = [0, sorted.length]
  while (low < high) {
    const middle = (low + high) >> 1
    if (sorted[middle] < wanted) low = middle + 1
    else high = middle
  }
  return low
}

export class Points {
  /** @param {Page} page @param {{step: number[], flags: number[], loss: any[]}} flagged @param {any[]} metrics */
  constructor(page, flagged, metrics) {
    /** Steps that were skipped. @type {number[]} */
    this.skips = []
    /** Steps whose loss is not finite, and what it is. @type {{step: number, loss: string}[]} */
    this.nonfinite = []
    /** @type {Map<string, Line>} */
    this.metrics = new Map()
    this.setPage(page)
    this.addFlags(flagged)
    this.addMetrics(metrics)
  }

  /** Take other points of the same run, as for a zoom. @param {Page} page */
  setPage(page) {
    this.total = page.total
    this.bucket = page.bucket
    /** @type {Record<string, Line>} */
    this.lines = {}
    /** Of lines in buckets, the mean of each. @type {Record<string, Line>} */
    this.means = {}
    for (const [name, { x, y, mean_x: meanX, mean_y: meanY }] of Object.entries(page.series)) {
      this.lines[name] = { x, y: drawable(y) }
      if (meanX.length) this.means[name] = { x: meanX, y: drawable(meanY) }
    }
  }

  get count() { return this.lines.loss.x.length }

  /** Replace everything from the first new step on: after a resume, steps run again. @param {Record<string, any[]>} steps */
  addSteps(steps) {
    const first = steps.step[0]
    for (const [name, line] of [...Object.entries(this.lines), ...Object.entries(this.means)]) {
      const end = position(line.x, first)
      line.x = line.x.slice(0, end).concat(steps.step)
      line.y = line.y.slice(0, end).concat(drawable(steps[name]))
    }
    this.total = first - 1 + steps.step.length
    this.skips.length = position(this.skips, first)
    this.nonfinite = this.nonfinite.filter(({ step }) => step < first)
    this.addFlags(steps)
  }

  /** @param {{step: number[], flags: number[], loss: any[]}} steps in order */
  addFlags({ step, flags, loss }) {
    step.forEach((number, i) => {
      if (flags[i] & SKIPPED) this.skips.push(number)
      if (flags[i] & NONFINITE_LOSS) this.nonfinite.push({ step: number, loss: loss[i] ?? 'NaN' })
    })
  }

  /** @param {{name: string, step: number, value: number|string|null}[]} metrics in order */
  addMetrics(metrics) {
    for (const { name, step, value } of metrics) {
      const line = this.metrics.get(name) ?? { x: [], y: [] }
      const end = position(line.x, step)
      line.x = [...line.x.slice(0, end), step]
      line.y = [...line.y.slice(0, end), isNumber(value) ? value : null]
      this.metrics.set(name, line)
    }
  }

  /** Where steps stand on the x axis. @param {number[]} steps @param {'step'|'applied'|'time'} mode @returns {number[]} */
  x(steps, mode) {
    if (mode === 'applied') return steps.map((step) => step - position(this.skips, step + 1))
    if (mode === 'time') return steps.map((step) => this.seconds(step))
    return steps
  }

  /** Seconds from the run's start to a step. @param {number} step */
  seconds(step) {
    const { x, y } = this.lines.elapsed_ms
    const i = Math.min(position(x, step), x.length - 1)
    if (i <= 0 || x[i] === step) return (y[Math.max(i, 0)] ?? 0) / 1000
    const share = (step - x[i - 1]) / (x[i] - x[i - 1])
    return (y[i - 1] + share * (y[i] - y[i - 1])) / 1000
  }

  /** The steps that a stretch of the x axis covers. @param {number[]} range @param {string} mode */
  steps(range, mode) {
    if (mode === 'step') return range
    const steps = this.lines.elapsed_ms.x
    const at = this.x(steps, mode)
    const last = steps.length - 1
    return range.map((x) => steps[Math.min(position(at, x), last)] ?? 1)
  }
}

/** Exponential moving average without its start's bias; gaps stay gaps. @param {(number|null)[]} values @param {number} weight */
export const smoothed = (values, weight) => {
  let [sum, norm] = [0, 0]
  return values.map((value) => {
    if (value === null) return null
    sum = weight * sum + (1 - weight) * value
    norm = weight * norm + (1 - weight)
    return sum / norm
  })
}

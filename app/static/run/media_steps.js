// Files of a key over its steps, and histograms in the same bins.

/** @param {{step: number}[]} files in order of steps */
export const stepsOf = (files) => [...new Set(files.map(({ step }) => step))]

/** Index of the last step up to one; -1: there is none. @param {number[]} steps @param {number} step */
export const lastUntil = (steps, step) => steps.findLastIndex((each) => each <= step)

/**
 * The files of a step.
 * @template {{step: number, name: string}} F
 * @param {F[]} files
 * @param {number} step
 * @returns {F[]} in order of names, as people count; that of the key first
 */
export const filesAt = (files, step) =>
  files
    .filter((file) => file.step === step)
    .toSorted(
      (a, b) =>
        Number(a.name.includes('.cell-')) - Number(b.name.includes('.cell-')) ||
        a.name.localeCompare(b.name, undefined, { numeric: true }),
    )

/** Common number of bins of histograms. */
export const BINS = 64

/** @typedef {{lowest: number, highest: number, counts: number[], nonfinite?: number}} Histogram */

/**
 * Histograms in the same bins: the counts of each are spread over the bins that theirs overlap.
 * @param {Histogram[]} histograms
 */
export const rebinned = (histograms) => {
  const low = Math.min(...histograms.map(({ lowest }) => lowest))
  const high = Math.max(...histograms.map(({ highest }) => highest))
  const width = (high - low) / BINS || 1
  const counts = histograms.map(({ lowest, highest, counts }) => {
    const bins = new Array(BINS).fill(0)
    const own = (highest - lowest) / counts.length
    counts.forEach((value, i) => {
      const [from, to] = [(lowest + i * own - low) / width, (lowest + (i + 1) * own - low) / width]
      const first = Math.min(Math.floor(from), BINS - 1)
      if (!own) {
        bins[first] += value
        return
      }
      for (let bin = first; bin < Math.min(Math.ceil(to), BINS); bin++)
        bins[bin] += (value * (Math.min(to, bin + 1) - Math.max(from, bin))) / (to - from)
    })
    return bins
  })
  return { low, width, counts }
}

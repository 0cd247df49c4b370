// What a run logged over its steps: what it showed as of a step, and histograms in the same bins.

/** @typedef {{name: string, step: number, figure: Found}} Shown */

/** What a name last showed, up to a step. @param {Shown[]} all in order of steps @param {number} step @returns {Map<string, Shown>} */
export const asOf = (all, step) => new Map(all.filter((each) => each.step <= step).map((each) => [each.name, each]))

/** Of histograms in the same bins. */
export const BINS = 64

/** @typedef {{lowest: number, highest: number, counts: number[]}} Histogram */

/** Histograms in the same bins: the counts of each are spread over the bins that theirs overlap. @param {Histogram[]} histograms */
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
      if (!own) { bins[first] += value; return }
      for (let bin = first; bin < Math.min(Math.ceil(to), BINS); bin++) bins[bin] += value * (Math.min(to, bin + 1) - Math.max(from, bin)) / (to - from)
    })
    return bins
  })
  return { low, width, counts }
}

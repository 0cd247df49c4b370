// The numbers of several runs, fetched a few runs at a time; each few are drawn when they have come.
import { insisted } from 'http'
import { Points } from 'points'

/** Runs per request and concurrent requests, so that the first are drawn early. */
const [CHUNK, AT_ONCE] = [5, 3]
/** Points per run. With half as many, runs of a few thousand steps would have to be drawn from buckets of 64. */
const POINTS = 2000

/**
 * @param {string} api
 * @param {import('url_state').View} view
 * @param {() => string[]} drawn names of series and metrics
 * @param {() => void} onCome
 */
export const seriesOf = (api, view, drawn, onCome) => {
  /** @type {Map<string, Points>} */
  const points = new Map()
  /** Latest request of each run: an earlier response is not shown. @type {Map<string, number>} */
  const latest = new Map()
  let fetches = 0

  /** The steps that the view shows, of whichever run goes farthest. @returns {Record<string, string>} */
  const stretch = () => {
    const { range, x } = view
    if (!range || !points.size) return {}
    const spans = [...points.values()].filter((each) => each.hasAxis(x)).map((each) => each.steps(range, x))
    const [first, last] = [Math.min(...spans.map(([a]) => a)), Math.max(...spans.map(([, b]) => b))]
    return spans.length && last >= 1
      ? { first: String(Math.max(Math.floor(first), 1)), last: String(Math.ceil(last)) }
      : {}
  }

  /** @param {string[]} some ids of runs */
  const fetchSeries = async (some) => {
    const isFirst = !points.size
    const number = ++fetches
    for (const id of some) latest.set(id, number)
    const names = new Set(drawn().map((name) => (name === 'examples_per_second' ? 'step_us' : name)))
    const asked = stretch()
    const chunks = Array.from({ length: Math.ceil(some.length / CHUNK) }, (_, i) =>
      some.slice(i * CHUNK, (i + 1) * CHUNK),
    )
    const next = async () => {
      for (let chunk = chunks.shift(); chunk; chunk = chunks.shift()) {
        const query = new URLSearchParams({ runs: chunk.join(), points: String(POINTS), ...asked })
        for (const name of names) query.append('series', name)
        const { runs } = await (await insisted(`${api}/comparison/series?${query}`)).json()
        for (const [id, page] of Object.entries(runs)) {
          if (latest.get(id) !== number) continue
          const known = points.get(id)
          if (known) known.setPage(page, asked.first ? [Number(asked.first), Number(asked.last)] : [1, Infinity])
          else points.set(id, new Points(page))
        }
        onCome()
      }
    }
    await Promise.all(Array.from({ length: AT_ONCE }, next))
    // Which steps a stretch of another axis is only their own numbers say.
    if (isFirst && view.range) await fetchSeries(some)
  }
  return { points, fetchSeries }
}

// How many powers of two each module's largest numbers were below fp16's largest, look by look.
import { inTurn, insisted } from 'http'
import { createPlot } from 'charts'
import { escaped, number } from 'formats'
import { names } from 'layers'

const AMPLE = 16 // powers of two: no fainter from here on

/** @typedef {{steps: number[], modules: string[], left: (number|string|null)[][]}} Looks "-Infinity": inf or NaN was there */

/** @param {number|string|null} left */
const drawable = (left) => (left === null ? null : Math.min(Math.max(Number(left), 0), AMPLE))

/** @param {number|string|null} left */
const words = (left) => (left === null ? 'nothing but zeros' : Number(left) < 0 ? 'none left' : `${number(left, 2)} powers of two left`)

/** @param {Looks} found @param {Record<string, string>} colors */
const headroomFigure = ({ steps, modules, left }, colors) => {
  const map = {
    type: 'heatmap', x: steps, y: modules.map((_, i) => i), z: left.map((row) => row.map(drawable)),
    zmin: 0, zmax: AMPLE, colorscale: [[0, colors.skip], [5 / AMPLE, colors.scale], [1, colors.card]], hoverongaps: false,
    customdata: left.map((row, i) => row.map((each) => [escaped(modules[i]), words(each)])),
    hovertemplate: '%{customdata[0]}, step %{x}: %{customdata[1]}<extra></extra>',
    colorbar: { title: { text: 'powers of two left', side: 'right' }, thickness: 10, outlinewidth: 0, tickvals: [0, 5, 10, AMPLE], ticktext: ['none', '5', '10', `${AMPLE}, more`] },
  }
  const axis = { gridcolor: colors.grid, zeroline: false }
  const layout = {
    height: 420, margin: { l: 62, r: 14, t: 10, b: 42 }, paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)',
    font: { family: 'system-ui, sans-serif', size: 12, color: colors.quiet }, uirevision: 'same',
    hoverlabel: { bgcolor: colors.card, bordercolor: colors.edge, font: { color: colors.text } },
    xaxis: { title: { text: 'attempted step', standoff: 6 }, ...axis },
    yaxis: { autorange: 'reversed', ...names(modules), ...axis },
  }
  return { data: [map], layout, drawn: steps.length }
}

/** @param {HTMLElement} section @param {string} api address of the run */
export const createHeadroom = (section, api) => {
  const plot = createPlot(section.querySelector('[data-headroom-plot]'), headroomFigure)
  const refresh = inTurn(async () => {
    plot.draw(await (await insisted(`${api}/headroom`)).json())
  })
  refresh()
  return { refresh }
}

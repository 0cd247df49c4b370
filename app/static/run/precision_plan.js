// Page of a precision plan: its points as a chart, or the wait for them.
import { insisted, pause } from 'http'
import { createPlot } from 'charts'
import { planFigure } from 'plan_figure'
import { root } from 'root'

const WAIT_MS = 2000
const ENDED = ['finished', 'failed', 'cancelled']

const frame = document.querySelector('[data-plan-of]')
const api = `${root}/api/v1/runs/${frame.dataset.planOf}`
const element = document.querySelector('[data-plan-plot]')
if (element) {
  const plot = createPlot(element, planFigure)
  plot.draw((await (await insisted(`${api}/precision-plan`)).json()).plan)
} else if (frame.dataset.over === 'false') {
  let status = ''
  while (!ENDED.includes(status)) {
    await pause(WAIT_MS)
    status = (await (await insisted(api)).json()).status
  }
  location.reload()
}

#include "penstock/train/report/report_style.h"

namespace penstock::train {

const std::string_view kReportStyle = R"(<style>
:root{color-scheme:light dark;--paper:#f5f7f8;--card:#fff;--edge:#dfe5e9;--ink:#12212b;--soft:#56656f;--lane:#eaeff2;--tick:#e3e9ec;--axis:#9aa8b1;--wait:#b9c4cb;
--c1:#2a78d6;--c2:#eb6834;--c3:#1baf7a;--c4:#c98500;--c5:#d55181;--c6:#008300;--c7:#4a3aa7;--c8:#c23a39}
@media(prefers-color-scheme:dark){:root{--paper:#0f161b;--card:#172027;--edge:#2a363f;--ink:#e8eef1;--soft:#9aabb6;--lane:#222d35;--tick:#26323a;--axis:#5d6d78;--wait:#4b5a65;
--c1:#4a95ee;--c2:#ee7b4a;--c3:#26b583;--c4:#d9a02b;--c5:#e0709b;--c6:#46ad46;--c7:#9b90f0;--c8:#ec7474}}
*{box-sizing:border-box}
body{margin:0;font:14px/1.5 Inter,'Segoe UI','Helvetica Neue',Arial,sans-serif;color:var(--ink);background:var(--paper)}
main{max-width:1220px;margin:0 auto;padding:28px 24px 56px}
h1{font-size:25px;line-height:1.25;margin:0;letter-spacing:-.01em;overflow-wrap:anywhere}h2{font-size:17px;margin:0 0 12px}h3{font-size:14px;margin:18px 0 8px}
.sub{color:var(--soft);margin:4px 0 0;overflow-wrap:anywhere}
.state{display:inline-block;font-size:12.5px;font-weight:600;border-radius:99px;padding:2px 11px;margin-left:10px;vertical-align:4px;color:#fff;background:#17825c}.state.open{background:#b45309}
section{background:var(--card);border:1px solid var(--edge);border-radius:10px;padding:18px 22px;margin-top:16px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(235px,1fr));gap:12px;margin-top:18px}
.tile{background:var(--card);border:1px solid var(--edge);border-radius:10px;padding:12px 16px}
.tile span{display:block;color:var(--soft);font-size:12.5px}.tile strong{display:block;font-size:23px;line-height:1.3;font-weight:650;letter-spacing:-.01em;white-space:nowrap}
.notes{border-left:4px solid #d08700}.notes ul{margin:0;padding-left:18px}
.two{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(420px,100%),1fr));gap:8px 28px}
figure{margin:0 0 8px}figcaption{font-weight:600;font-size:13.5px}
.legend{display:flex;flex-wrap:wrap;gap:2px 18px;color:var(--soft);font-size:12.5px;margin:3px 0 6px}.legend span{display:inline-flex;align-items:center;gap:6px}
.legend i{width:18px;height:0;border-top:2.5px solid currentColor}.legend i.faint{opacity:.4}.legend i.dotted{border-top-style:dashed}.legend b,.swatch{width:12px;height:12px;border-radius:3px;display:inline-block}.legend b+b{margin-left:-4px}
svg{display:block;font-family:inherit}svg.chart{width:100%;height:auto;touch-action:pan-y}
.tick{stroke:var(--tick)}.axis{stroke:var(--axis)}.note{font-size:11.5px;fill:var(--soft)}.label{font-size:13px;fill:var(--ink)}.end{text-anchor:end}.mid{text-anchor:middle}
.curve{fill:none;stroke:currentColor;stroke-width:2;stroke-linejoin:round}.curve.faint{stroke-width:1;opacity:.38}.curve.dotted{stroke-dasharray:6 4}.dot{fill:currentColor;stroke:var(--card);stroke-width:1.5}
.c1{color:var(--c1)}.c2{color:var(--c2)}.c3{color:var(--c3)}.c4{color:var(--c4)}.c5{color:var(--c5)}.c6{color:var(--c6)}.c7{color:var(--c7)}.c8{color:var(--c8)}
.cross{stroke:var(--axis);stroke-dasharray:3 3;pointer-events:none}.mark{fill:currentColor;stroke:var(--card);stroke-width:2;pointer-events:none}
.lane{fill:var(--lane);background:var(--lane)}.wait{fill:var(--wait);background:var(--wait)}.number{font-size:11.5px;text-anchor:middle;pointer-events:none}.simulated{opacity:.72}
.scroll{overflow-x:auto}.timeline{max-width:none}
.dim .cell{opacity:.16}.dim .cell.same{opacity:1}
.stack{display:flex;height:26px;border-radius:6px;overflow:hidden;background:var(--lane);margin:3px 0}.stack div{min-width:0;overflow:hidden;white-space:nowrap;color:#fff;font-size:12px;line-height:26px;text-align:center}
.stack.thin{height:13px}.p1{background:#2f6fc4}.p2{background:#c7822d}.p3{background:#8796a1}.p4{background:#7d56b8}.p5{background:#169ca8}.p6{background:transparent}.p7{background:#5aa03c}
.bars{display:grid;grid-template-columns:auto 1fr;gap:4px 14px;align-items:center;margin:6px 0 12px}.bars>span{color:var(--soft);font-size:12.5px;text-align:right}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:13.5px}td,th{padding:4px 22px 4px 0;text-align:left;vertical-align:top}.columns td{overflow-wrap:anywhere}.wide td:first-child{white-space:nowrap}th{color:var(--soft);font-weight:500;border-bottom:1px solid var(--edge);white-space:nowrap}tbody tr+tr td{border-top:1px solid var(--tick)}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}code{font:12.5px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
details{margin-top:6px}summary{cursor:pointer;color:var(--soft)}.columns{columns:2 380px;column-gap:36px}.columns table{width:100%;break-inside:avoid;margin-bottom:14px}.columns td:last-child{text-align:right}
.none{color:var(--soft);margin:6px 0}footer{color:var(--soft);font-size:12.5px;margin-top:22px}
#tip{position:fixed;display:none;white-space:pre-line;background:#12212b;color:#fff;border:1px solid #3a4a55;padding:7px 11px;border-radius:7px;font-size:12.5px;font-variant-numeric:tabular-nums;pointer-events:none;max-width:420px;z-index:9}
#tip i{display:inline-block;width:9px;height:9px;border-radius:50%;background:currentColor;margin-right:7px}#tip em{font-style:normal;color:#fff}
@media(max-width:700px){figure{overflow-x:auto}svg.chart{min-width:540px}}
@media print{section{break-inside:avoid}}
</style>
)";

const std::string_view kReportScript = R"(<script>
'use strict';
const tip=document.getElementById('tip');
const put=event=>{tip.style.display='block';
  tip.style.left=Math.min(event.clientX+16,innerWidth-tip.offsetWidth-8)+'px';
  tip.style.top=Math.min(event.clientY+16,innerHeight-tip.offsetHeight-8)+'px'};
const hide=()=>{tip.style.display='none'};
const words=(value,unit)=>{
  if(unit==='B'){const names=['B','KiB','MiB','GiB','TiB'];let i=0;while(value>=1024&&i<4){value/=1024;i++}return value.toFixed(i?1:0)+' '+names[i]}
  if(unit==='tok/s')return value>=1000?(value/1000).toFixed(value>=99950?0:1)+' ktok/s':value.toFixed(0)+' tok/s';
  if(unit==='ms')return value.toFixed(value<10?2:1)+' ms';
  return String(Number(value.toPrecision(5)))};
const nearest=(points,x)=>{let low=0,high=points.length/2-1;
  while(low<high){const middle=low+high>>1;if(points[2*middle]<x)low=middle+1;else high=middle}
  if(low>0&&x-points[2*low-2]<points[2*low]-x)low--;return low};
const make=(name,parent,type)=>{const node=document.createElementNS('http://www.w3.org/2000/svg',type);node.setAttribute('class',name);parent.append(node);return node};
for(const chart of document.querySelectorAll('svg.chart')){
  const data=JSON.parse(chart.dataset.chart),[left,top,right,bottom]=data.box,names=[...chart.parentNode.querySelectorAll('.legend span')].map(span=>span.textContent);
  let cross=null,marks=[];
  const clear=()=>{hide();cross?.remove();cross=null;for(const mark of marks)mark.remove();marks=[]};
  chart.addEventListener('pointermove',event=>{
    clear();
    const box=chart.getBoundingClientRect(),at=(event.clientX-box.left)*chart.viewBox.baseVal.width/box.width;
    if(at<left-4||at>right+4)return;
    const wanted=data.x[0]+(at-left)/(right-left)*(data.x[1]-data.x[0]);
    const found=data.series.map(series=>series.points.length?nearest(series.points,wanted):-1);
    let x=null;
    data.series.forEach((series,i)=>{if(found[i]<0)return;const own=series.points[2*found[i]];if(x===null||Math.abs(own-wanted)<Math.abs(x-wanted))x=own});
    if(x===null)return;
    const place=x=>left+(x-data.x[0])/(data.x[1]-data.x[0])*(right-left);
    cross=make('cross',chart,'line');for(const [name,value] of [['x1',place(x)],['x2',place(x)],['y1',top],['y2',bottom]])cross.setAttribute(name,value);
    tip.replaceChildren('step '+x);
    data.series.forEach((series,i)=>{
      if(found[i]<0)return;
      const own=series.points[2*found[i]],y=series.points[2*found[i]+1],share=data.log?Math.log(y/data.y[0])/Math.log(data.y[1]/data.y[0]):(y-data.y[0])/(data.y[1]-data.y[0]);
      const mark=make('mark c'+series.colour,chart,'circle');mark.setAttribute('cx',place(own));mark.setAttribute('cy',bottom-share*(bottom-top));mark.setAttribute('r',4);marks.push(mark);
      const line=document.createElement('div'),spot=document.createElement('i'),text=document.createElement('em');line.className='c'+series.colour;
      text.textContent=names[i]+': '+words(y,data.unit)+(own===x?'':' (step '+own+')');line.append(spot,text);tip.append(line)});
    put(event)});
  chart.addEventListener('pointerleave',clear)}
for(const picture of document.querySelectorAll('svg.timeline')){
  const cells=[...picture.querySelectorAll('.cell')];let shown=null;
  picture.addEventListener('pointermove',event=>{
    const cell=event.target.closest('.cell');
    if(!cell){hide();picture.classList.remove('dim');return}
    tip.textContent=cell.dataset.tip;put(event);
    const one=cell.dataset.m;picture.classList.toggle('dim',one!=='-1');
    if(one!==shown){shown=one;for(const other of cells)other.classList.toggle('same',other.dataset.m===one)}});
  picture.addEventListener('pointerleave',()=>{hide();picture.classList.remove('dim')})}
</script>
)";

}  // namespace penstock::train
